"""Batches that go to the device, and what comes back.

A batch is *packed*: its sequences follow one another without padding.

Shapes: T tokens in the batch, N sequences. Sequence i owns the rows
`cu_seq_lens[i]:cu_seq_lens[i + 1]` of every tensor that has T rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

import numpy as np
import torch

from cfg_core.prefill_only.types import FloatArray, SequenceState, SparseVector, Task


@dataclass(frozen=True, slots=True)
class EqualLengthRun:
    """`num` consecutive sequences of `length` tokens each; the first starts at row `start`.

    keys: how many of a sequence's first tokens may be attended to.
    """

    start: int
    num: int
    length: int
    keys: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the sequences of a batch begin and end, so that each attends only to itself.

    The model's forward passes it on to the attention function. A model does not know that its
    input is packed: without the plan, tokens would attend to neighbouring sequences. The attention
    function therefore refuses a call without a plan.
    """

    runs: tuple[EqualLengthRun, ...]
    cu_seq_lens: torch.Tensor
    """int32 [N + 1], on the device of the model."""
    max_length: int

    @property
    def hides_tokens(self) -> bool:
        """Whether some tokens may not be attended to by any."""
        return any(run.keys < run.length for run in self.runs)


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

    def rows(self) -> list[slice]:
        """The rows of each sequence."""
        bounds = self.plan.cu_seq_lens.tolist()
        return [slice(start, end) for start, end in pairwise(bounds)]

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


def pack(
    sequences: Sequence[SequenceState],
    *,
    first_position: int = 0,
    token_types: bool = False,
    pin_memory: bool = False,
) -> PackedBatch:
    """Pack `sequences`, which are sorted by length, on the host; at least one.

    first_position: position of a sequence's first token, for example 2 in XLM-R.

    token_types: whether the model has token types.

    pin_memory: put the tensors into page-locked memory, for asynchronous copies to a GPU.
    """
    if any(sequence.num_unseen for sequence in sequences):
        sequences = sorted(sequences, key=lambda s: (len(s), s.num_unseen))
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    ends = lengths.cumsum()
    num_tokens = int(ends[-1])

    def tensor(array: np.ndarray) -> torch.Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory() if pin_memory else made

    def row(ids: Iterable[Sequence[int]]) -> torch.Tensor:
        return tensor(np.fromiter(chain.from_iterable(ids), np.int64, num_tokens))[None]

    types = None
    if token_types and any(s.token_type_ids for s in sequences):
        types = row(s.token_type_ids or [0] * len(s) for s in sequences)
    positions = np.arange(num_tokens) - np.repeat(ends - lengths, lengths) + first_position
    return PackedBatch(
        sequences=sequences,
        token_ids=row(s.token_ids for s in sequences),
        position_ids=tensor(positions)[None],
        token_type_ids=types,
        plan=AttentionPlan(
            runs=tuple(_runs([(len(s), len(s) - s.num_unseen) for s in sequences])),
            cu_seq_lens=tensor(np.concatenate(([0], ends)).astype(np.int32)),
            max_length=int(lengths[-1]),
        ),
        lengths=tensor(lengths),
    )


def _runs(sizes: Sequence[tuple[int, int]]) -> Iterator[EqualLengthRun]:
    """The runs of sequences of equal length and with equally many keys, in order."""
    start = 0
    for (length, keys), members in groupby(sizes):
        num = sum(1 for _ in members)
        yield EqualLengthRun(start, num, length, keys)
        start += num * length
