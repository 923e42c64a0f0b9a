"""Where the suffixes of a step are in its batch, for both model runners (core/suffixes.py).

A suffix is the end of what its leader computes in a step. Behind its last token is the row of the
negative, and before its first token that of the leader, which is sampled. The negatives' rows come
behind the rows of the batch, so that vLLM's own rows stay where they are: one for each request, and
one more for each of its drafts. A group with a suffix has no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cfg_core.vllm_plugin.wire import StepGuidance
from cfg_core.vllm_plugin.worker.staging import to_device


class SuffixRows(NamedTuple):
    """The suffixes of one step. Tensors are int64, on the device.

    names: those of joint groups, as `Group.blended` calls them.
    counts: [batch], the number of suffix tokens at each place.
    counts_there: [batch], the same as a tensor.
    first_row: [batch + names + 1], where the rows of logits of each place and suffix begin.
    shifts: [rows of the batch], how far the suffix moves each of them. A place with a suffix has
        one row.
    places: [names], the places of their leaders.
    leaders: [names], the rows of their leaders.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    counts_there: torch.Tensor
    first_row: np.ndarray
    shifts: torch.Tensor
    places: np.ndarray
    leaders: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of logits without those of the suffixes."""
        return len(self.shifts)

    def rows(self, stock: torch.Tensor) -> torch.Tensor:
        """The places in the step's tokens of all rows: [rows of the batch + names].

        stock: [rows of the batch], what they are to vLLM, for which a suffix belongs to the text.
        """
        return torch.cat([stock - self.shifts, stock[self.leaders]])

    def adapters(self, stock: Sequence[int]) -> tuple[int, ...]:
        """The adapter of each row: [rows of the batch + names].

        stock: [batch] or [rows of the batch], as vLLM's runners have them.
        """
        counts = np.diff(self.first_row[: len(self.counts) + 1])
        ids = np.asarray(stock)
        by_row = ids if len(ids) == self.num_rows else np.repeat(ids, counts)
        behind = by_row[self.first_row[self.places]]
        return tuple(np.concatenate([by_row, behind]).tolist())

    def all_names(self, names: Sequence[str]) -> list[str]:
        """The names of all rows, those of the batch first."""
        return [*names, *self.names]


class SuffixStager:
    """Finds the suffixes of each step, and keeps the tensors while nothing moves."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._rows: SuffixRows | None = None

    def stage(
        self,
        step: StepGuidance,
        names: Sequence[str],
        first_row: np.ndarray,
        device: torch.device,
    ) -> SuffixRows:
        """The suffixes of a step that has some.

        names: the stream at each place.
        first_row: [batch + 1], where the rows of logits of each place begin.
        """
        key = (step.suffixes, step.joint, tuple(names), first_row.tobytes(), device)
        if self._rows is None or key != self._key:
            self._rows, self._key = stage_suffixes(step, names, first_row, device), key
        return self._rows


def stage_suffixes(
    step: StepGuidance, names: Sequence[str], first_row: np.ndarray, device: torch.device
) -> SuffixRows:
    """As `SuffixStager.stage`."""
    place_of = {name: place for place, name in enumerate(names)}
    counts = np.zeros(len(names), dtype=np.int64)
    for leader, tokens in step.suffixes:
        counts[place_of[leader]] = len(tokens)
    joint = [row.group for row in step.joint if row.suffix]
    places = np.array([place_of[group.leader] for group in joint], dtype=np.int64)
    return SuffixRows(
        tuple(group.blended[1] for group in joint),
        counts,
        to_device(counts, np.int64, device),
        np.concatenate([first_row, first_row[-1] + 1 + np.arange(len(joint))]),
        to_device(np.repeat(counts, np.diff(first_row)), np.int64, device),
        places,
        to_device(first_row[places], np.int64, device),
    )
