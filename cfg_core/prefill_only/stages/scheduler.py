"""Chooses the waiting sequences that form the next batch. Uses no torch, clock or threads.

Requests take turns, measured in tokens (fair queueing, Demers, Keshav and Shenker 1989). A sequence
is due when each waiting request has had as many tokens computed as its own request has before it.
So a request with one input does not wait for another request's two thousand inputs. Sequences of
one request keep their order, and so do sequences without a request.

There is one exception to this order. Attention is fastest over sequences of equal length, so
sequences in a window at the head of the queue join the batch if their length is close to that of
the first sequence. The first sequence is always in the batch, so the sequence at place n waits for
at most n batches, if no request that comes later is due before it. A sequence that was skipped
`max_skips` times goes before better matches. A batch runs to its end: there is no decode phase, so
nothing is preempted.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from typing import Any

from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import SequenceState


class Scheduler:
    """A queue of sequences. Not thread-safe: one thread owns it."""

    def __init__(self, options: EngineOptions, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = options.max_batch_sequences
        self._sort_window = options.sort_window
        self._max_skips = options.max_skips
        self._queue: list[SequenceState] = []
        """Sorted by `due`. Of sequences with the same `due`, the older comes first."""
        self._queued_tokens = 0
        self._turn = 0.0
        """Virtual time of the fair queue: tokens to which each waiting request is entitled."""
        self._ends: dict[Any, float] = {}
        """For each waiting request, the `due` of a sequence that would follow its last one."""

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    @property
    def queued_sequences(self) -> int:
        return len(self._queue)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Queue sequences. The input processor has ensured that each fits into one batch."""
        for sequence in sequences:
            assert 0 < len(sequence) <= self._max_batch_tokens
            sequence.due = max(self._turn, self._ends.get(sequence.request, 0.0))
            self._ends[sequence.request] = sequence.due + len(sequence)
            self._queued_tokens += len(sequence)
            insort_right(self._queue, sequence, key=attrgetter("due"))

    def cancel(self, sequences: Iterable[SequenceState]) -> None:
        """Take sequences out of the queue. No effect on those that run already."""
        gone = [sequence for sequence in sequences if not sequence.cancelled]
        for sequence in gone:
            sequence.cancelled = True
        self._drop_cancelled()

    def schedule(self) -> list[SequenceState]:
        """Take the next batch off the queue, sorted by length. It is empty if nothing waits."""
        window = self._queue[: self._sort_window]
        if not window:
            return []
        batch = self._choose(window)
        chosen = set(map(id, batch))
        self._take(window, chosen)
        self._pass_turns(sum(map(len, batch)))
        batch.sort(key=len)
        return batch

    def _choose(self, window: list[SequenceState]) -> list[SequenceState]:
        """The first sequence, those skipped often, then those nearest in length to the first.

        A sequence for which the budget of the batch does not suffice is left out.
        """
        first = window[0]
        waited_enough = [s for s in window[1:] if s.num_skips >= self._max_skips]
        others = [s for s in window[1:] if s.num_skips < self._max_skips]
        # A stable sort: of equals, the first in the queue goes first.
        others.sort(key=lambda s: abs(len(s) - len(first)))
        batch, tokens = [first], len(first)
        for sequence in (*waited_enough, *others):
            if len(batch) == self._max_batch_sequences:
                break
            if tokens + len(sequence) <= self._max_batch_tokens:
                batch.append(sequence)
                tokens += len(sequence)
        return batch

    def _take(self, window: list[SequenceState], chosen: set[int]) -> None:
        last = max(index for index, sequence in enumerate(window) if id(sequence) in chosen)
        left = [sequence for sequence in window if id(sequence) not in chosen]
        for sequence in window[:last]:
            if id(sequence) not in chosen:
                sequence.num_skips += 1
        self._queue[: len(window)] = left
        self._queued_tokens -= sum(len(sequence) for sequence in window if id(sequence) in chosen)

    def _pass_turns(self, num_tokens: int) -> None:
        """Advance the virtual time by a batch of `num_tokens`.

        A request that has had all its turns no longer counts. The time is never behind the head of
        the queue, so an idle request saves up no turns.
        """
        self._turn += num_tokens / max(1, len(self._ends))
        if self._queue:
            self._turn = max(self._turn, self._queue[0].due)
        self._ends = {request: end for request, end in self._ends.items() if end > self._turn}

    def _drop_cancelled(self) -> None:
        self._queue = [sequence for sequence in self._queue if not sequence.cancelled]
        self._queued_tokens = sum(map(len, self._queue))
        waiting = {sequence.request for sequence in self._queue}
        self._ends = {request: end for request, end in self._ends.items() if request in waiting}

    def check_integrity(self) -> None:
        """Assert the invariants that hold between calls."""
        assert self._queued_tokens == sum(map(len, self._queue))
        assert not any(sequence.cancelled for sequence in self._queue)
        assert all(one.due <= other.due for one, other in pairwise(self._queue))
