"""Where the suffixes of a step are in its batch, for both model runners (core/suffixes.py).

A suffix is the end of what its leader computes in a step. Behind its last token is the row of the
negative, and before its first token that of the leader, which is sampled. The negatives' rows come
behind the rows of the batch, so that vLLM's own rows stay where they are: one for each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    leaders: [names], the places of their leaders.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    counts_there: torch.Tensor
    leaders: torch.Tensor

    def rows(self, last: torch.Tensor) -> torch.Tensor:
        """The rows that are needed of a step: [batch + names].

        last: [batch], the last row of each place.
        """
        return torch.cat([last - self.counts_there, last[self.leaders]])

    def first_row(self, first_row: np.ndarray) -> np.ndarray:
        """`first_row` [batch + 1], where the rows of logits of each place begin, with those of the
        suffixes behind them: [batch + names + 1]."""
        behind = first_row[-1] + 1 + np.arange(len(self.names))
        return np.concatenate([first_row, behind])

    def all_names(self, names: Sequence[str]) -> list[str]:
        """The names of all rows, those of the batch first."""
        return [*names, *self.names]


class SuffixStager:
    """Finds the suffixes of each step, and keeps the tensors while nothing moves."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._rows: SuffixRows | None = None

    def stage(
        self, step: StepGuidance | None, names: Sequence[str], device: torch.device
    ) -> SuffixRows | None:
        """The suffixes of a step; None if it has none. names: the stream at each place."""
        if step is None or not step.suffixes:
            return None
        key = (step.suffixes, step.joint, tuple(names), device)
        if key != self._key:
            place_of = {name: place for place, name in enumerate(names)}
            self._rows, self._key = stage_suffixes(step, place_of, device), key
        return self._rows


def stage_suffixes(
    step: StepGuidance, place_of: Mapping[str, int], device: torch.device
) -> SuffixRows:
    """As `SuffixStager.stage`, of a step that has suffixes. place_of: each stream's place."""
    counts = np.zeros(len(place_of), dtype=np.int64)
    for leader, tokens in step.suffixes:
        counts[place_of[leader]] = len(tokens)
    joint = [row.group for row in step.joint if row.suffix]
    leaders = [place_of[group.leader] for group in joint]
    return SuffixRows(
        tuple(group.blended[1] for group in joint),
        counts,
        to_device(counts, np.int64, device),
        to_device(leaders, np.int64, device),
    )
