"""Requests and tenants take turns, measured in tokens. Uses no torch, clock or threads.

Two levels of fair queueing (Demers, Keshav and Shenker 1989; Goyal, Vin and Cheng 1996). Tenants
share by weight. The requests of one tenant share its part equally. So a tenant gets no more by
sending more requests, and a small request does not wait for a large one of the same tenant.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

from cfg_core.prefill_only.types import SequenceState


class TenantLine:
    """The sequences of one tenant that wait, in the order of their requests' turns.

    A sequence is due when each waiting request has had as many tokens computed as its own request
    has before it. Sequences of one request keep their order.

    finish: virtual time of the tenants at which the tenant has had all that it got so far.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.finish = 0.0
        self.queue: list[SequenceState] = []
        """Sorted by `due`. Of sequences with the same `due`, the older comes first."""
        self._turn = 0.0
        """Virtual time of the requests: tokens to which each waiting request is entitled."""
        self._ends: dict[Any, float] = {}
        """For each waiting request, the `due` of a sequence that would follow its last one."""

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence."""
        self.weight = sequence.weight
        sequence.due = max(self._turn, self._ends.get(sequence.request, 0.0))
        self._ends[sequence.request] = sequence.due + len(sequence)
        insort_right(self.queue, sequence, key=attrgetter("due"))

    def take(self, num_seen: int, chosen: Collection[int], num_tokens: int) -> None:
        """Remove sequences, and let `num_tokens` of the requests' turns pass.

        A request that has had all its turns no longer counts. The time is never behind the head of
        the queue, so an idle request saves up no turns.

        num_seen: how many sequences at the head include all that are removed.
        chosen: the ids (Python's) of these sequences.
        """
        self.queue[:num_seen] = [s for s in self.queue[:num_seen] if id(s) not in chosen]
        self._turn += num_tokens / max(1, len(self._ends))
        if self.queue:
            self._turn = max(self._turn, self.queue[0].due)
        self._ends = {request: end for request, end in self._ends.items() if end > self._turn}

    def drop_cancelled(self) -> None:
        """Remove the sequences that are cancelled; their requests take no more turns."""
        self.queue = [sequence for sequence in self.queue if not sequence.cancelled]
        waiting = {sequence.request for sequence in self.queue}
        self._ends = {request: end for request, end in self._ends.items() if request in waiting}

    def check_integrity(self) -> None:
        """Assert the invariants that hold between calls."""
        assert not any(sequence.cancelled for sequence in self.queue)
        assert all(one.due <= other.due for one, other in pairwise(self.queue))


class FairQueue:
    """The waiting sequences of all tenants. Not thread-safe.

    A tenant's turn comes when it has had the least, relative to its weight, of all tenants that
    wait. An idle tenant saves up no turns.
    """

    def __init__(self) -> None:
        self._lines: dict[str, TenantLine] = {}
        self._virtual = 0.0
        """Virtual time of the tenants: tokens, relative to a weight of 1, that each has had."""

    def __len__(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())

    def __iter__(self) -> Iterator[SequenceState]:
        for line in self._lines.values():
            yield from line.queue

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence for its tenant."""
        line = self._lines.get(sequence.tenant)
        if line is None:
            line = self._lines[sequence.tenant] = TenantLine(sequence.weight)
        if not line.queue:
            line.finish = max(line.finish, self._virtual)
        line.add(sequence)

    def window(self, size: int) -> list[SequenceState]:
        """The next `size` sequences, in the order of the turns of tenants and requests."""
        waiting = [line for line in self._lines.values() if line.queue]
        if len(waiting) == 1:
            return waiting[0].queue[:size]
        return list(islice(_in_turn(waiting), size))

    def take(self, window: list[SequenceState], chosen: Iterable[SequenceState]) -> None:
        """Remove `chosen`, which are from the last `window`, and charge their tenants for them."""
        if window:
            self._virtual = max(self._virtual, self._lines[window[0].tenant].finish)
        seen, tokens = _per_tenant(window), _per_tenant(chosen, by_tokens=True)
        ids = {id(sequence) for sequence in chosen}
        for tenant, num_tokens in tokens.items():
            line = self._lines[tenant]
            line.take(seen[tenant], ids, num_tokens)
            line.finish += num_tokens / line.weight
        self._forget_idle()

    def drop_cancelled(self) -> None:
        """Remove the sequences that are cancelled."""
        for line in self._lines.values():
            line.drop_cancelled()
        self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the tenants without sequences that are owed nothing and owe nothing."""
        if any(line.queue for line in self._lines.values()):
            gone = [
                tenant
                for tenant, line in self._lines.items()
                if not line.queue and line.finish <= self._virtual
            ]
        else:
            gone = list(self._lines)  # nobody waits, so nobody has to be paid back
        for tenant in gone:
            del self._lines[tenant]

    def check_integrity(self) -> None:
        """Assert the invariants that hold between calls."""
        for tenant, line in self._lines.items():
            line.check_integrity()
            assert all(sequence.tenant == tenant for sequence in line.queue)
            assert not line.queue or line.finish >= self._virtual


def _in_turn(lines: Iterable[TenantLine]) -> Iterator[SequenceState]:
    """The sequences of all lines, in the order in which their tenants' turns come."""
    heap = [(line.finish, place, iter(line.queue), line) for place, line in enumerate(lines)]
    heapify(heap)
    while heap:
        finish, place, rest, line = heap[0]
        sequence = next(rest, None)
        if sequence is None:
            heappop(heap)
            continue
        yield sequence
        heapreplace(heap, (finish + len(sequence) / line.weight, place, rest, line))


def _per_tenant(sequences: Iterable[SequenceState], by_tokens: bool = False) -> dict[str, int]:
    """For each tenant, how many sequences it has here, or how many tokens these have."""
    totals: dict[str, int] = {}
    for sequence in sequences:
        size = len(sequence) if by_tokens else 1
        totals[sequence.tenant] = totals.get(sequence.tenant, 0) + size
    return totals
