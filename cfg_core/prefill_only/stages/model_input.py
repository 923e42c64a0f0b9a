"""Packs sequences into a PackedBatch: the part of a forward that the host does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import numpy as np
import torch

from cfg_core.prefill_only.batch import AttentionPlan, PackedBatch, Run
from cfg_core.prefill_only.types import SequenceState


class ModelInputBuilder:
    """Packs batches for one model.

    first_position: position of a sequence's first token, for example 2 in XLM-R. Usually 0.

    pin_memory: put the tensors into page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self, first_position: int, uses_token_types: bool, pin_memory: bool = False
    ) -> None:
        self._first_position = first_position
        self._uses_token_types = uses_token_types
        self._pin_memory = pin_memory

    def build(self, sequences: Sequence[SequenceState]) -> PackedBatch:
        """Pack `sequences`, which are sorted by length; at least one."""
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        ends = lengths.cumsum()
        starts = np.repeat(ends - lengths, lengths)
        positions = np.arange(ends[-1]) - starts + self._first_position
        return PackedBatch(
            sequences=sequences,
            token_ids=self._row(_flat(s.token_ids for s in sequences), int(ends[-1])),
            position_ids=self._tensor(positions)[None],
            token_type_ids=self._token_types(sequences, int(ends[-1])),
            plan=AttentionPlan(
                runs=tuple(_runs(lengths.tolist())),
                cu_seq_lens=self._tensor(np.concatenate(([0], ends)).astype(np.int32)),
                max_length=int(lengths[-1]),
            ),
            lengths=self._tensor(lengths),
        )

    def _token_types(
        self, sequences: Sequence[SequenceState], num_tokens: int
    ) -> torch.Tensor | None:
        if not self._uses_token_types or not any(s.token_type_ids for s in sequences):
            return None
        return self._row(_flat(s.token_type_ids or [0] * len(s) for s in sequences), num_tokens)

    def _row(self, ids: Iterator[int], num_tokens: int) -> torch.Tensor:
        return self._tensor(np.fromiter(ids, dtype=np.int64, count=num_tokens))[None]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin_memory else tensor


def _flat(rows: Iterator[Sequence[int]]) -> Iterator[int]:
    return chain.from_iterable(rows)


def _runs(lengths: Sequence[int]) -> Iterator[Run]:
    """The runs of sequences of equal length, in order."""
    start = 0
    for length, members in groupby(lengths):
        num = sum(1 for _ in members)
        yield Run(start, num, length)
        start += num * length
