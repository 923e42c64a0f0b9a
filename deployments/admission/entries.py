"""What the admission queue (queue.py) remembers: requests, tenants, and what happened lately."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from deployments.requests.demand import Demand

OTHERS_S = 60.0
"""Seconds for which a tenant counts as active after its last request."""

RATE_WINDOW_S = 30.0
"""Seconds over which the rate of ending requests is measured."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A tenant, as the queue sees it.

    max_streams: running and waiting, at most; None: no limit of its own.
    """

    tenant: str = "anonymous"
    weight: float = 1.0
    max_streams: int | None = None


class State(Enum):
    """Of a request: waiting for a place, holding one, or done (or given up)."""

    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False, slots=True)
class Entry:
    """A request in the queue.

    priority: a smaller number goes first, as in vLLM.
    start: virtual time at which its turn comes.
    admitted: done when the request has its place.
    """

    share: Share
    demand: Demand
    priority: int
    start: float
    admitted: asyncio.Future[None]
    state: State = State.WAITING

    @property
    def cost(self) -> float:
        """Virtual time that the request takes."""
        return self.demand.tokens / self.share.weight


@dataclass(slots=True)
class TenantEntries:
    """What one tenant has in the queue and with the engines."""

    finish: float = 0.0  # virtual time at which its last request ends
    streams: int = 0  # waiting and running
    running: int = 0  # streams
    starting: int = 0  # requests with a place, of whose answer nothing has arrived
    waiting: list[Entry] = field(default_factory=list)


class ActiveTenants:
    """Whether more than one tenant was active within OTHERS_S.

    It remembers only the last two tenants, which is enough.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: tuple[str, float] | None = None
        self._other_at = -math.inf  # when a tenant other than the last was last seen

    def seen(self, tenant: str) -> None:
        if self._last is not None and self._last[0] != tenant:
            self._other_at = self._last[1]
        self._last = tenant, self._now()

    def are_several(self) -> bool:
        return self._now() - self._other_at < OTHERS_S


class DrainRate:
    """Tokens per second of the requests that ended within the last RATE_WINDOW_S."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._start = now, now()
        self._ended: deque[tuple[float, int]] = deque()

    def ended(self, tokens: int) -> None:
        self._ended.append((self._now(), tokens))
        self._forget_old()

    def per_second(self) -> float:
        """The rate; 0 if no request has ended lately."""
        self._forget_old()
        span_s = min(RATE_WINDOW_S, max(1.0, self._now() - self._start))
        return sum(tokens for _, tokens in self._ended) / span_s

    def _forget_old(self) -> None:
        while self._ended and self._ended[0][0] < self._now() - RATE_WINDOW_S:
            self._ended.popleft()
