"""Which waiting sequences make the next batch. Pure: no torch, no clock, no threads.

First come, first served, with one liberty: within a window at the head of the queue, sequences of a length
like that of the oldest one go with it, because attention runs fastest over sequences of equal length. The oldest
one always goes, so the one at place n waits for n batches at most; one that was passed over `max_skips` times goes
before better matches. A batch runs to its end: there is no decode phase, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import SequenceState


class Scheduler:
    """A queue of sequences. Not thread-safe: one thread owns it."""

    def __init__(self, options: EngineOptions, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = options.max_batch_sequences
        self._sort_window = options.sort_window
        self._max_skips = options.max_skips
        self._queue: deque[SequenceState] = deque()
        self._queued_tokens = 0

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    @property
    def queued_sequences(self) -> int:
        return len(self._queue)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Each at most `max_batch_tokens` long; the input processor has seen to that."""
        for sequence in sequences:
            assert 0 < len(sequence) <= self._max_batch_tokens
            self._queue.append(sequence)
            self._queued_tokens += len(sequence)

    def cancel(self, sequences: Iterable[SequenceState]) -> None:
        """They leave the queue before the next batch. No effect on those that run already."""
        gone = [sequence for sequence in sequences if not sequence.cancelled]
        for sequence in gone:
            sequence.cancelled = True
        self._drop_cancelled()

    def schedule(self) -> list[SequenceState]:
        """Take the next batch off the queue, sorted by length; empty if nothing waits."""
        window = list(islice(self._queue, self._sort_window))
        if not window:
            return []
        batch = self._choose(window)
        chosen = set(map(id, batch))
        self._take(window, chosen)
        batch.sort(key=len)
        return batch

    def _choose(self, window: list[SequenceState]) -> list[SequenceState]:
        """The oldest, the often skipped, then those nearest in length to the oldest, as far as the budget goes."""
        first = window[0]
        waited_enough = [s for s in window[1:] if s.num_skips >= self._max_skips]
        others = [s for s in window[1:] if s.num_skips < self._max_skips]
        others.sort(key=lambda s: abs(len(s) - len(first)))  # stable: among equals the older goes first
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
        for _ in window:
            self._queue.popleft()
        left = [sequence for sequence in window if id(sequence) not in chosen]
        for sequence in window[:last]:
            if id(sequence) not in chosen:
                sequence.num_skips += 1
        self._queue.extendleft(reversed(left))
        self._queued_tokens -= sum(len(sequence) for sequence in window if id(sequence) in chosen)

    def _drop_cancelled(self) -> None:
        self._queue = deque(sequence for sequence in self._queue if not sequence.cancelled)
        self._queued_tokens = sum(map(len, self._queue))

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        assert self._queued_tokens == sum(map(len, self._queue))
        assert not any(sequence.cancelled for sequence in self._queue)
