"""Types of the batches that go to the device, and of what comes back.

A batch is *packed*: its sequences follow one another without padding.

Shapes: T tokens in the batch, N sequences. Sequence i owns the rows
`cu_seq_lens[i]:cu_seq_lens[i + 1]` of every tensor that has T rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cfg_core.prefill_only.types import FloatArray, SequenceState, SparseVector, Task


@dataclass(frozen=True, slots=True)
class Run:
    """`num` consecutive sequences of `length` tokens each; the first starts at row `start`."""

    start: int
    num: int
    length: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the sequences of a batch begin and end, so that each attends only to itself.

    The model's forward passes it on to the attention function. A model does not know that its
    input is packed: without the plan, tokens would attend to neighbouring sequences. The attention
    function therefore refuses a call without a plan.
    """

    runs: tuple[Run, ...]
    cu_seq_lens: torch.Tensor
    """int32 [N + 1], on the device of the model."""
    max_length: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One batch, on the host or on the device."""

    sequences: Sequence[SequenceState]
    """Sorted by length."""
    token_ids: torch.Tensor
    """int64 [1, T]."""
    position_ids: torch.Tensor
    """int64 [1, T]. Each sequence begins at the model's first position."""
    token_type_ids: torch.Tensor | None
    """int64 [1, T]; None if all are 0 or if the model has no token types."""
    plan: AttentionPlan
    lengths: torch.Tensor
    """int64 [N]."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        if device == self.token_ids.device:
            return self

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return PackedBatch(
            sequences=self.sequences,
            token_ids=moved(self.token_ids),
            position_ids=moved(self.position_ids),
            token_type_ids=None if self.token_type_ids is None else moved(self.token_type_ids),
            plan=AttentionPlan(self.plan.runs, moved(self.plan.cu_seq_lens), self.plan.max_length),
            lengths=moved(self.lengths),
        )


Values = Mapping[Task, Sequence[FloatArray | SparseVector | None]]
"""For each task, one value per sequence of the batch: None if the sequence did not ask for it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the executor delivers for a batch: its values, or the error that prevented them."""

    sequences: Sequence[SequenceState]
    values: Values
    error: Exception | None = None
