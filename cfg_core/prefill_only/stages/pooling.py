"""Pooling of packed token states, and what all poolers share.

Shapes: T tokens, N sequences, D components of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cfg_core.prefill_only.batch import PackedBatch
from cfg_core.prefill_only.types import FloatArray, SparseVector

Pooler = Callable[[torch.Tensor, PackedBatch, Sequence[int]], Sequence[FloatArray | SparseVector]]
"""(states [T, D], batch, wanted) -> one result for each index in `wanted`.

wanted: the indices of the sequences that ask for the task.
"""


def host(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def _segments(batch: PackedBatch) -> torch.Tensor:
    """int64 [T]: the index of the sequence that a row belongs to."""
    return torch.repeat_interleave(batch.lengths, output_size=batch.num_tokens)


def pool(
    name: str, states: torch.Tensor, batch: PackedBatch, skipped: torch.Tensor | None = None
) -> torch.Tensor:
    """Pool states [T, D] to float32 [N, D], by the pooling `name`.

    skipped: int64 [N], how many leading rows of each sequence are left out.
    """
    starts, ends = batch.plan.cu_seq_lens[:-1].long(), batch.plan.cu_seq_lens[1:].long()
    if name == "last":
        return states[ends - 1].float()
    if name == "cls":
        return states[starts if skipped is None else starts + skipped].float()
    positions = torch.arange(len(states), device=states.device) - starts.repeat_interleave(
        batch.lengths
    )
    kept = torch.ones_like(positions, dtype=torch.bool)
    if skipped is not None:
        kept = positions >= skipped.repeat_interleave(batch.lengths)
    if name == "max":
        return _maximum(states.float().masked_fill(~kept[:, None], float("-inf")), batch)
    weights = kept * (positions + 1.0) if name == "weightedmean" else kept.float()
    return _weighted(states, weights, batch, root=name == "mean_sqrt_len_tokens")


def _maximum(rows: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    empty = torch.full((len(batch.lengths), rows.shape[1]), float("-inf"), device=rows.device)
    return empty.scatter_reduce(0, _segments(batch)[:, None].expand_as(rows), rows, "amax")


def _weighted(
    states: torch.Tensor, weights: torch.Tensor, batch: PackedBatch, *, root: bool
) -> torch.Tensor:
    """The sum of weighted rows, divided by the sum of weights, or by its square root if `root`."""
    segments = _segments(batch)
    sums = torch.zeros(len(batch.lengths), states.shape[1], device=states.device)
    sums.index_add_(0, segments, states.float() * weights[:, None])
    totals = torch.zeros(len(batch.lengths), device=states.device).index_add_(0, segments, weights)[
        :, None
    ]
    return sums / (totals.sqrt() if root else totals)
