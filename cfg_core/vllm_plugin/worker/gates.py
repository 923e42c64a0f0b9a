"""Which samples of a step's probes are dropped: those from the first open gate on (core/gates.py).

A probe with drafts has a row for each of them, and one more. Each row has a gate of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cfg_core.vllm_plugin.wire import DROPPED, StepGuidance
from cfg_core.vllm_plugin.worker.staging import to_device


def probe_places(step: StepGuidance, names: Sequence[str]) -> list[int]:
    """The places of a step's probes in its batch. names: the stream at each place."""
    probed = {row.streams[0] for row in step.joint if row.probe}
    return [place for place, name in enumerate(names) if name in probed] if probed else []


def first_open(
    places: Sequence[int], first_row: np.ndarray, strengths: torch.Tensor
) -> torch.Tensor:
    """How many rows of each of these places come before its first open gate: [places] int64.

    first_row: [batch + 1], where the rows of logits of each place begin.
    strengths: [2, rows], see `rows.blended`.
    """
    starts, ends = first_row[places], first_row[np.asarray(places) + 1]
    counts = ends - starts
    ahead = np.arange(counts.max())
    at = np.minimum(starts[:, None] + ahead, ends[:, None] - 1)  # the last row again, if too long
    is_open = strengths[0, to_device(at, np.int64, strengths.device)] > 0
    closed = (~is_open).long().cumprod(1).sum(1)
    return closed.minimum(to_device(counts, np.int64, strengths.device))


class Kept(NamedTuple):
    """What V1 keeps of those probes of a step that have an open gate.

    counts: by their places in the batch, how many rows come before the first open gate.
    first_row: [batch + 1], where the rows of logits of each place begin.
    """

    counts: dict[int, int]
    first_row: np.ndarray

    @property
    def none(self) -> list[int]:
        """The places of which nothing is kept, not even the first sample."""
        return [place for place, count in self.counts.items() if not count]

    def cut(self, tokens: torch.Tensor, strengths: torch.Tensor) -> None:
        """Drop the samples of the other places that come from an open gate on, in place.

        tokens: [batch, 1 + drafts], -1 behind the last one of each place.
        strengths: [2, rows], see `rows.blended`. What is dropped is marked in it.
        """
        counts = {place: count for place, count in self.counts.items() if count}
        if not counts:
            return
        arrays = (list(counts), list(counts.values()))
        places, first = (to_device(array, np.int64, tokens.device) for array in arrays)
        own = tokens[places]
        rows = to_device(self.first_row[arrays[0]] + arrays[1], np.int64, tokens.device)
        _mark(strengths, rows, own.gather(1, first[:, None])[:, 0] >= 0)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        tokens[places] = own.masked_fill(columns >= first[:, None], -1)


def blind_places(
    step: StepGuidance, names: Sequence[str], computed: np.ndarray, known: np.ndarray
) -> list[int]:
    """The places of V1's probes that have no token to begin with.

    With async scheduling the step behind an open probe is scheduled as if that had given a token.
    Its row means nothing, and counts as one whose gate is open.

    names: the stream at each place of the batch.
    computed, known: [batch], the tokens that the host takes for computed, and those that there are.
    """
    return [place for place in probe_places(step, names) if computed[place] >= known[place]]


def kept_by_v1(
    step: StepGuidance,
    names: Sequence[str],
    first_row: np.ndarray,
    strengths: torch.Tensor,
    blind: Sequence[int] = (),
) -> Kept:
    """Of which probes of a step not all is kept. This waits for the device.

    names: the stream at each place of the batch.
    first_row: [batch + 1], where the rows of logits of each place begin.
    strengths: [2, rows], see `rows.blended`. A probe of which nothing is kept is marked in it; the
        others are when they have been sampled (`Kept.cut`).
    blind: see `blind_places`.
    """
    places = probe_places(step, names)
    if not places:
        return Kept({}, first_row)
    if blind:
        rows = to_device(first_row[list(blind)], np.int64, strengths.device)
        strengths[:, rows] = 1.0
    closed = first_open(places, first_row, strengths).tolist()
    rows_of = np.diff(first_row)[places].tolist()
    kept = Kept({p: n for p, n, m in zip(places, closed, rows_of, strict=True) if n < m}, first_row)
    strengths[0, to_device(first_row[kept.none], np.int64, strengths.device)] = DROPPED
    return kept


def _mark(strengths: torch.Tensor, rows: torch.Tensor, is_dropped: torch.Tensor) -> None:
    """Mark the rows of which a sample was dropped, and not only a draft rejected before it.

    rows: [n] int64, the first row with an open gate of each probe. is_dropped: [n] bool.
    """
    strengths[0, rows] = torch.where(is_dropped, DROPPED, strengths[0, rows])


def drop_open(
    step: StepGuidance,
    names: Sequence[str],
    first_row: np.ndarray,
    strengths: torch.Tensor | None,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Count the samples of probes from an open gate on as rejected, on the device, in place.

    names: the stream at each place of the batch.
    first_row: [batch + 1], where the rows of logits of each place begin.
    strengths: [2, rows], see `rows.blended`; it is there if a step has a probe. What is dropped is
        marked in it.
    num_sampled, num_rejected: [batch].
    """
    places = probe_places(step, names)
    if not places:
        return
    assert strengths is not None
    at = to_device(places, np.int64, num_sampled.device)
    sampled, closed = num_sampled[at], first_open(places, first_row, strengths)
    dropped = (sampled - closed).clamp(min=0)
    starts, ends = first_row[places], first_row[np.asarray(places) + 1]
    first, last = (to_device(rows, np.int64, at.device) for rows in (starts, ends - 1))
    _mark(strengths, (first + closed).minimum(last), dropped > 0)
    num_sampled[at] -= dropped.to(num_sampled.dtype)
    num_rejected[at] += dropped.to(num_rejected.dtype)
