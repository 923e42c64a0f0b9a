"""Chooses the waiting sequences that form the next batch. Uses no torch, clock or threads.

Tenants and requests take turns, measured in tokens (fair_queue.py). So a request with one input
does not wait for another request's two thousand inputs, and a tenant does not wait for another
tenant's hundred requests. Sequences of one request keep their order, and so do sequences without a
request.

There is one exception to this order. Attention is fastest over sequences of equal length, so
sequences in a window at the head of the queue join the batch if their length is close to that of
the first sequence. The first sequence is always in the batch, so the sequence at place n waits for
at most n batches, if no request that comes later is due before it. A sequence that was skipped
`max_skips` times goes before better matches. A batch runs to its end: there is no decode phase, so
nothing is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable

from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.stages.fair_queue import FairQueue
from cfg_core.prefill_only.types import SequenceState


class Scheduler:
    """A queue of sequences. Not thread-safe: one thread owns it."""

    def __init__(self, options: EngineOptions, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = options.max_batch_sequences
        self._sort_window = options.sort_window
        self._max_skips = options.max_skips
        self._queue = FairQueue()
        self._queued_tokens = 0

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
            self._queued_tokens += len(sequence)
            self._queue.add(sequence)

    def cancel(self, sequences: Iterable[SequenceState]) -> None:
        """Take sequences out of the queue. No effect on those that run already."""
        gone = [sequence for sequence in sequences if not sequence.cancelled]
        for sequence in gone:
            sequence.cancelled = True
        self._queue.drop_cancelled()
        self._queued_tokens = sum(map(len, self._queue))

    def schedule(self) -> list[SequenceState]:
        """Take the next batch off the queue, sorted by length. It is empty if nothing waits."""
        window = self._queue.window(self._sort_window)
        if not window:
            return []
        batch = self._choose(window)
        self._count_skips(window, batch)
        self._queue.take(window, batch)
        self._queued_tokens -= sum(map(len, batch))
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

    def _count_skips(self, window: list[SequenceState], batch: list[SequenceState]) -> None:
        """Note a skip for each sequence in front of the last one that is taken."""
        chosen = set(map(id, batch))
        last = max(index for index, sequence in enumerate(window) if id(sequence) in chosen)
        for sequence in window[:last]:
            if id(sequence) not in chosen:
                sequence.num_skips += 1

    def check_integrity(self) -> None:
        """Assert the invariants that hold between calls."""
        assert self._queued_tokens == sum(map(len, self._queue))
        self._queue.check_integrity()
