"""The tenants that the admission queue (queue.py) knows, and their requests in it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from deployments.requests.demand import Demand

OTHERS_S = 60.0
"""Seconds for which a tenant counts as active after its last request."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A tenant, as the queue sees it.

    max_streams: running and waiting, at most; None: no limit of its own.
    """

    tenant: str = "anonymous"
    weight: float = 1.0
    max_streams: int | None = None


class State(Enum):
    """Of a request in the queue: waiting for a place, holding one, or done (or given up)."""

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
class Tenant:
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
