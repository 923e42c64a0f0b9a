"""The admission queue: a bounded queue in front of the engines, fair between tenants.

There is one in front of the generator, and one in front of each encoder (encoder_queue.py). It
counts streams (a guided request is two) and tokens. A lower `priority` goes first, as in vLLM.
Among requests of equal priority, tenants share by weight: start-time fair queueing (Goyal, Vin and
Cheng, SIGCOMM 1996), in tokens. A full queue takes room from the tenant that fills it most (longest
queue drop), so that one tenant's burst keeps nobody else out. A request that does not fit gets 429,
with the time in which the queue is expected to have room.

Used from one event loop. It depends on neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable

from cfg_core.errors import OverloadedError, RequestError
from deployments.admission.entries import (
    ActiveTenants,
    DrainRate,
    Entry,
    Share,
    State,
    TenantEntries,
)
from deployments.requests.demand import Demand

RETRY_AT_LEAST_S, RETRY_AT_MOST_S = 1.0, 120.0
SIZES = ("requests", "streams", "tokens")


class Place:
    """One request's place with the engines, which the caller must `leave`."""

    def __init__(self, queue: AdmissionQueue, entry: Entry) -> None:
        self._queue, self._entry = queue, entry
        self._is_starting = True

    def begun(self) -> None:
        """Note that the engines have begun with the request; a second call does nothing."""
        if self._is_starting:
            self._is_starting = False
            self._queue._begun(self._entry)

    def leave(self) -> None:
        """Free the place, because the request has ended; a second call does nothing."""
        if self._entry.state is State.RUNNING:
            self.begun()
            self._queue._leave(self._entry)


class AdmissionQueue:
    """The requests that wait for the engines, and those that have a place there.

    A request is admitted as soon as it fits, or if nothing else is running.

    capacity: returns how many streams may be with the engines now.
    max_streams, max_tokens: how many may wait.
    most_of_one: returns how many streams one tenant may have with the engines while another tenant
    is active. This keeps room for the other tenant's next request.
    most_starting: returns how many requests of one tenant may be with the engines without a sign of
    an answer while another tenant is active, because a replica takes time to begin with each.
    one_for_each: whether a tenant with nothing running starts a request at once, even if there is
    no room. It is for engines that let tenants take turns inside, and whose requests do not hold
    memory that others need.
    reason: what is full, in the OverloadedError.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_streams: int,
        max_tokens: int,
        now: Callable[[], float] = time.monotonic,
        most_of_one: Callable[[], float] = lambda: math.inf,
        most_starting: Callable[[], float] = lambda: math.inf,
        one_for_each: bool = False,
        reason: str = "queue",
    ) -> None:
        self._capacity, self._max_streams, self._max_tokens = capacity, max_streams, max_tokens
        self._most_of_one, self._most_starting = most_of_one, most_starting
        self._one_for_each, self._reason = one_for_each, reason
        self._active = ActiveTenants(now)
        # A heap. Entries that are no longer waiting stay in it until they are popped.
        self._line: list[tuple[int, float, int, Entry]] = []
        self._tie = itertools.count()
        self._virtual = 0.0
        self._tenants: dict[str, TenantEntries] = {}
        self._running: Counter[str] = Counter()  # sums of `_sizes`
        self._queued: Counter[str] = Counter()
        self._rate = DrainRate(now)

    async def enter(self, share: Share, demand: Demand, priority: int = 0) -> Place:
        """Wait for a place with the engines.

        Cancelling leaves the queue. Raises OverloadedError if there is no room to wait. Raises
        RequestError if the tenant may never have that many streams.
        """
        self._active.seen(share.tenant)
        self._check_share(share, demand)
        entry = self._wait_in_line(share, demand, priority)
        place = Place(self, entry)
        self.admit()
        self._make_room()
        try:
            await entry.admitted
        except asyncio.CancelledError:
            place.leave()
            if entry.state is State.WAITING:
                self._drop(entry)
            raise
        return place

    def _begun(self, entry: Entry) -> None:
        self._tenants[entry.share.tenant].starting -= 1
        self.admit()

    def _leave(self, entry: Entry) -> None:
        entry.state = State.GONE
        demand, tenant = entry.demand, self._tenants[entry.share.tenant]
        self._running.subtract(_sizes(demand))
        self._rate.ended(demand.tokens)
        tenant.streams -= demand.streams
        tenant.running -= demand.streams
        self.admit()
        self._forget_idle()

    def admit(self) -> None:
        """Admit every request that fits now.

        Called whenever a place is freed. Call it also when the capacity may have grown.
        """
        if self._one_for_each:
            self._start_one_for_each()
        passed_over = []
        capacity, several_tenants = self._capacity(), self._active.are_several()
        while self._line:
            *_, entry = self._line[0]
            if entry.admitted.cancelled() and entry.state is State.WAITING:
                self._drop(entry)  # its caller was cancelled, but has not run since
            if entry.state is State.WAITING:
                if (
                    self._running["streams"]
                    and self._running["streams"] + entry.demand.streams > capacity
                ):
                    break
                if several_tenants and self._has_its_share(entry):
                    passed_over.append(self._line[0])
                else:
                    self._start(entry)
            heapq.heappop(self._line)
        for item in passed_over:
            heapq.heappush(self._line, item)

    def retry_after_s(self) -> float:
        """Seconds until half of the waiting tokens will have gone.

        The estimate uses the rate at which requests end.
        """
        rate = self._rate.per_second()
        expected = self._queued["tokens"] / 2 / rate if rate else 0.0
        return min(RETRY_AT_MOST_S, max(RETRY_AT_LEAST_S, expected))

    @property
    def stats(self) -> dict[str, int]:
        """What waits and what runs."""
        queued = {f"queued_{name}": self._queued[name] for name in SIZES}
        return queued | {f"running_{name}": self._running[name] for name in ("requests", "streams")}

    def check_integrity(self) -> None:
        """For tests: assert what must hold between events."""
        waiting = [entry for *_, entry in self._line if entry.state is State.WAITING]
        assert {id(e) for t in self._tenants.values() for e in t.waiting} == {
            id(e) for e in waiting
        }
        assert self._queued["tokens"] == sum(entry.demand.tokens for entry in waiting)
        assert self._queued["streams"] == sum(entry.demand.streams for entry in waiting)
        assert self._queued["requests"] == len(waiting)
        assert min(self._running[name] for name in SIZES) >= 0
        streams = sum(tenant.streams for tenant in self._tenants.values())
        assert streams == self._running["streams"] + self._queued["streams"]
        assert sum(tenant.running for tenant in self._tenants.values()) == self._running["streams"]
        assert all(0 <= tenant.starting <= tenant.running for tenant in self._tenants.values())

    # --- the line ---------------------------------------------------------------------------------

    def _check_share(self, share: Share, demand: Demand) -> None:
        if share.max_streams is None:
            return
        if demand.streams > share.max_streams:
            raise RequestError(
                f"The request has {demand.streams} streams (a guided choice has two or more), and"
                f" this API key may have {share.max_streams} at once: ask for fewer choices or"
                " prompts."
            )
        tenant = self._tenants.get(share.tenant)
        held = tenant.streams if tenant else 0
        if held + demand.streams > share.max_streams:
            raise OverloadedError(
                f"This API key has {held} of its {share.max_streams} streams in use: wait until one"
                " ends.",
                self.retry_after_s(),
                "key_streams",
            )

    def _has_its_share(self, entry: Entry) -> bool:
        """Whether the tenant has all that one tenant may have while others are active.

        A tenant with nothing running may always start a request.
        """
        tenant = self._tenants[entry.share.tenant]
        if not tenant.running:
            return False
        return (
            tenant.starting >= self._most_starting()
            or tenant.running + entry.demand.streams > self._most_of_one()
        )

    def _wait_in_line(self, share: Share, demand: Demand, priority: int) -> Entry:
        tenant = self._tenants.setdefault(share.tenant, TenantEntries())
        start = max(self._virtual, tenant.finish)
        entry = Entry(share, demand, priority, start, asyncio.get_running_loop().create_future())
        tenant.finish = start + entry.cost
        tenant.waiting.append(entry)
        tenant.streams += demand.streams
        self._queued.update(_sizes(demand))
        heapq.heappush(self._line, (priority, start, next(self._tie), entry))
        return entry

    def _start(self, entry: Entry) -> None:
        self._leave_line(entry, State.RUNNING)
        self._virtual = max(self._virtual, entry.start)
        self._running.update(_sizes(entry.demand))
        tenant = self._tenants[entry.share.tenant]
        tenant.running += entry.demand.streams
        tenant.starting += 1
        entry.admitted.set_result(None)

    def _start_one_for_each(self) -> None:
        """Start the first request of every tenant that has nothing running."""
        for tenant in self._tenants.values():
            if tenant.waiting and not tenant.running:
                waiting = [entry for entry in tenant.waiting if not entry.admitted.cancelled()]
                if waiting:
                    self._start(min(waiting, key=lambda entry: (entry.priority, entry.start)))

    def _make_room(self) -> None:
        """Refuse the last requests of the tenant that fills the queue most, until the rest fits."""
        while (
            self._queued["streams"] > self._max_streams or self._queued["tokens"] > self._max_tokens
        ):
            fullest = max(
                (tenant for tenant in self._tenants.values() if tenant.waiting),
                key=lambda tenant: sum(entry.cost for entry in tenant.waiting),
            )
            entry = max(fullest.waiting, key=lambda entry: (entry.priority, entry.start))
            wait_s = self.retry_after_s()
            self._drop(entry)
            if not entry.admitted.cancelled():
                message = f"Too many requests are waiting: try again in {wait_s:.0f} s."
                entry.admitted.set_exception(OverloadedError(message, wait_s, self._reason))

    def _drop(self, entry: Entry) -> None:
        """Remove a request that waits, for which its tenant is then not charged."""
        self._leave_line(entry, State.GONE)
        tenant = self._tenants[entry.share.tenant]
        tenant.finish -= entry.cost
        tenant.streams -= entry.demand.streams
        self._forget_idle()

    def _leave_line(self, entry: Entry, state: State) -> None:
        entry.state = state
        self._tenants[entry.share.tenant].waiting.remove(entry)
        self._queued.subtract(_sizes(entry.demand))

    def _forget_idle(self) -> None:
        idle = [
            name for name, t in self._tenants.items() if not t.streams and t.finish <= self._virtual
        ]
        for name in idle:
            del self._tenants[name]


def _sizes(demand: Demand) -> dict[str, int]:
    return {"requests": 1, "streams": demand.streams, "tokens": demand.tokens}
