"""Who may go to an engine, and who waits: a bounded queue in front of the engines, fair between
tenants.

It is measured in streams (a guided request is two) and tokens. Lower `priority` goes first, as in
vLLM. Between requests of equal priority, tenants share by weight: start-time fair queueing (Goyal,
Vin and Cheng, SIGCOMM 1996), in tokens. A full queue takes room from the tenant that fills it most
(longest queue drop), so that nobody is kept out by another's burst. Whoever does not fit gets 429,
with the time in which the queue is expected to have room.

Used from one event loop. Knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from cfg_core.errors import OverloadedError, RequestError
from deployments.requests.demand import Demand

RATE_WINDOW_S = 30.0
"""Over which it is measured how fast requests come to an end."""

OTHERS_S = 60.0
"""For how long after its last request a tenant counts as being here."""

RETRY_AT_LEAST_S, RETRY_AT_MOST_S = 1.0, 120.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """A tenant, as the queue knows it. max_streams: running and waiting, at most; None: no bound of
    its own."""

    tenant: str = "anonymous"
    weight: float = 1.0
    max_streams: int | None = None


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False, slots=True)
class _Entry:
    share: Share
    demand: Demand
    priority: int
    start: float  # virtual time
    admitted: asyncio.Future[None]
    state: _State = _State.WAITING

    @property
    def cost(self) -> float:
        """Of virtual time."""
        return self.demand.tokens / self.share.weight


@dataclass(slots=True)
class _Tenant:
    finish: float = 0.0  # virtual time at which its last request ends
    streams: int = 0  # waiting and running
    running: int = 0  # streams
    starting: int = 0  # requests that have a place, and of whose answer nothing is here
    waiting: list[_Entry] = field(default_factory=list)


class Place:
    """What one request holds of the engines. The caller must `leave` it."""

    def __init__(self, queue: AdmissionQueue, entry: _Entry) -> None:
        self._queue, self._entry = queue, entry
        self._is_starting = True

    def begun(self) -> None:
        """The engines are at work on it. Again, it does nothing."""
        if self._is_starting:
            self._is_starting = False
            self._queue._begun(self._entry)

    def leave(self) -> None:
        """The request has ended, well or not: its place is free. Again, it does nothing."""
        if self._entry.state is _State.RUNNING:
            self.begun()
            self._queue._leave(self._entry)


class Company:
    """Whether more than one tenant was here within OTHERS_S. Remembers the last two, which is
    enough to tell."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: tuple[str, float] | None = None
        self._other_at = -math.inf  # when one that is not the last was seen

    def seen(self, tenant: str) -> None:
        if self._last is not None and self._last[0] != tenant:
            self._other_at = self._last[1]
        self._last = tenant, self._now()

    def is_mixed(self) -> bool:
        return self._now() - self._other_at < OTHERS_S


class AdmissionQueue:
    """capacity: asked each time, how many streams may be with the engines now.

    max_streams, max_tokens: that may wait. A request goes as soon as it fits, or if nothing else is
    running. While another tenant is here, or was within OTHERS_S, one tenant may have `most_of_one`
    streams there, so that who comes next finds a place; and `most_starting` requests of whose
    answer there is no sign, because a replica takes some time to begin with each. Both are asked
    each time. Default: as many as fit.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_streams: int,
        max_tokens: int,
        now: Callable[[], float] = time.monotonic,
        most_of_one: Callable[[], float] = lambda: math.inf,
        most_starting: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._capacity, self._max_streams, self._max_tokens = capacity, max_streams, max_tokens
        self._most_of_one, self._most_starting = most_of_one, most_starting
        self._company = Company(now)
        self._line: list[
            tuple[int, float, int, _Entry]
        ] = []  # a heap; those who left it are skipped
        self._tie = itertools.count()
        self._virtual = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._running = _Sum()
        self._queued = _Sum()
        self._rate = _DrainRate(now)
        self._refused = 0

    async def enter(self, share: Share, demand: Demand, priority: int = 0) -> Place:
        """Wait for a place with the engines. Cancelling leaves the queue.

        Raises OverloadedError if there is no room to wait, RequestError if the tenant may never
        have that much.
        """
        self._company.seen(share.tenant)
        self._check_share(share, demand)
        entry = self._wait_in_line(share, demand, priority)
        place = Place(self, entry)
        self.admit()
        self._make_room()
        try:
            await entry.admitted
        except asyncio.CancelledError:
            place.leave()
            if entry.state is _State.WAITING:
                self._drop(entry)
            raise
        return place

    def _begun(self, entry: _Entry) -> None:
        self._tenants[entry.share.tenant].starting -= 1
        self.admit()

    def _leave(self, entry: _Entry) -> None:
        entry.state = _State.GONE
        demand, tenant = entry.demand, self._tenants[entry.share.tenant]
        self._running -= demand
        self._rate.ended(demand.tokens)
        tenant.streams -= demand.streams
        tenant.running -= demand.streams
        self.admit()
        self._forget_idle()

    def admit(self) -> None:
        """Let go whoever fits now. Called whenever a place is freed; call it when the capacity may
        have grown."""
        passed_over = []
        capacity, is_mixed = self._capacity(), self._company.is_mixed()
        while self._line:
            *_, entry = self._line[0]
            if entry.admitted.cancelled() and entry.state is _State.WAITING:
                self._drop(entry)  # its caller has left, and has not had its turn to say so
            if entry.state is _State.WAITING:
                if (
                    self._running.streams
                    and self._running.streams + entry.demand.streams > capacity
                ):
                    break
                if is_mixed and self._has_its_share(entry):
                    passed_over.append(self._line[0])
                else:
                    self._start(entry)
            heapq.heappop(self._line)
        for item in passed_over:
            heapq.heappush(self._line, item)

    def retry_after_s(self) -> float:
        """In how many seconds half of what now waits will have gone, at the rate at which requests
        end."""
        rate = self._rate.per_second()
        expected = self._queued.tokens / 2 / rate if rate else 0.0
        return min(RETRY_AT_MOST_S, max(RETRY_AT_LEAST_S, expected))

    @property
    def stats(self) -> dict[str, int]:
        """What waits, what runs, and how many were refused since start."""
        return {
            "queued_requests": self._queued.requests,
            "queued_streams": self._queued.streams,
            "queued_tokens": self._queued.tokens,
            "running_requests": self._running.requests,
            "running_streams": self._running.streams,
            "refused_requests": self._refused,
        }

    def check_integrity(self) -> None:
        """Assert what must hold between events. For tests."""
        waiting = [entry for *_, entry in self._line if entry.state is _State.WAITING]
        assert {id(e) for t in self._tenants.values() for e in t.waiting} == {
            id(e) for e in waiting
        }
        assert self._queued.tokens == sum(entry.demand.tokens for entry in waiting)
        assert self._queued.streams == sum(entry.demand.streams for entry in waiting)
        assert self._queued.requests == len(waiting)
        assert min(self._running.streams, self._running.tokens, self._running.requests) >= 0
        streams = sum(tenant.streams for tenant in self._tenants.values())
        assert streams == self._running.streams + self._queued.streams
        assert sum(tenant.running for tenant in self._tenants.values()) == self._running.streams
        assert all(0 <= tenant.starting <= tenant.running for tenant in self._tenants.values())

    # --- the line ---------------------------------------------------------------------------------

    def _check_share(self, share: Share, demand: Demand) -> None:
        if share.max_streams is None:
            return
        if demand.streams > share.max_streams:
            raise RequestError(
                f"The request has {demand.streams} streams (a guided choice is two), this key may"
                f" have {share.max_streams} at once: ask for fewer choices or prompts."
            )
        tenant = self._tenants.get(share.tenant)
        held = tenant.streams if tenant else 0
        if held + demand.streams > share.max_streams:
            self._refused += 1
            raise OverloadedError(
                f"This key has {held} of its {share.max_streams} streams in use: wait until one"
                " ends.",
                self.retry_after_s(),
            )

    def _has_its_share(self, entry: _Entry) -> bool:
        """Whether its tenant has all that one may have beside others. With nothing, it may go."""
        tenant = self._tenants[entry.share.tenant]
        if not tenant.running:
            return False
        return (
            tenant.starting >= self._most_starting()
            or tenant.running + entry.demand.streams > self._most_of_one()
        )

    def _wait_in_line(self, share: Share, demand: Demand, priority: int) -> _Entry:
        tenant = self._tenants.setdefault(share.tenant, _Tenant())
        start = max(self._virtual, tenant.finish)
        entry = _Entry(share, demand, priority, start, asyncio.get_running_loop().create_future())
        tenant.finish = start + entry.cost
        tenant.waiting.append(entry)
        tenant.streams += demand.streams
        self._queued += demand
        heapq.heappush(self._line, (priority, start, next(self._tie), entry))
        return entry

    def _start(self, entry: _Entry) -> None:
        self._leave_line(entry, _State.RUNNING)
        self._virtual = max(self._virtual, entry.start)
        self._running += entry.demand
        tenant = self._tenants[entry.share.tenant]
        tenant.running += entry.demand.streams
        tenant.starting += 1
        entry.admitted.set_result(None)

    def _make_room(self) -> None:
        """Refuse the last comers of whoever fills the queue most, until the rest fits."""
        while self._queued.streams > self._max_streams or self._queued.tokens > self._max_tokens:
            fullest = max(
                (tenant for tenant in self._tenants.values() if tenant.waiting),
                key=lambda tenant: sum(entry.cost for entry in tenant.waiting),
            )
            entry = max(fullest.waiting, key=lambda entry: (entry.priority, entry.start))
            wait_s = self.retry_after_s()
            self._drop(entry)
            if not entry.admitted.cancelled():
                self._refused += 1
                message = f"Too many requests are waiting: try again in {wait_s:.0f} s."
                entry.admitted.set_exception(OverloadedError(message, wait_s))

    def _drop(self, entry: _Entry) -> None:
        """Take out one that waits. Its tenant is not charged for it."""
        self._leave_line(entry, _State.GONE)
        tenant = self._tenants[entry.share.tenant]
        tenant.finish -= entry.cost
        tenant.streams -= entry.demand.streams
        self._forget_idle()

    def _leave_line(self, entry: _Entry, state: _State) -> None:
        entry.state = state
        self._tenants[entry.share.tenant].waiting.remove(entry)
        self._queued -= entry.demand

    def _forget_idle(self) -> None:
        idle = [
            name for name, t in self._tenants.items() if not t.streams and t.finish <= self._virtual
        ]
        for name in idle:
            del self._tenants[name]


@dataclass(slots=True)
class _Sum:
    """Of demands."""

    requests: int = 0
    streams: int = 0
    tokens: int = 0

    def __iadd__(self, demand: Demand) -> _Sum:
        return self._add(demand, 1)

    def __isub__(self, demand: Demand) -> _Sum:
        return self._add(demand, -1)

    def _add(self, demand: Demand, sign: int) -> _Sum:
        self.requests += sign
        self.streams += sign * demand.streams
        self.tokens += sign * demand.tokens
        return self


class _DrainRate:
    """Tokens of the requests that ended, per second, over the last RATE_WINDOW_S."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._start = now, now()
        self._ended: deque[tuple[float, int]] = deque()

    def ended(self, tokens: int) -> None:
        self._ended.append((self._now(), tokens))
        self._forget_old()

    def per_second(self) -> float:
        """0 if nothing has ended lately."""
        self._forget_old()
        span_s = min(RATE_WINDOW_S, max(1.0, self._now() - self._start))
        return sum(tokens for _, tokens in self._ended) / span_s

    def _forget_old(self) -> None:
        while self._ended and self._ended[0][0] < self._now() - RATE_WINDOW_S:
            self._ended.popleft()
