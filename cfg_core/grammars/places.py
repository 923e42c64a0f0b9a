"""Places for trials of grammars, given out fairly between tenants. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cfg_core.errors import OverloadedError


class FairPlaces:
    """A fixed number of places. Whoever holds the fewest gets the next; one tenant never holds all,
    if there are two.

    Between tenants that hold equally many, who was served longest ago; within one, first come,
    first served.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        """max_waiting: of one tenant; beyond, OverloadedError."""
        self._free, self._most, self._max_waiting = places, max(1, places - 1), max_waiting
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns, self._served = 0, dict[str, int]()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """A place for `tenant`, while the block runs. A cancelled wait leaves nothing behind."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._release(tenant)

    async def _take(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._max_waiting:
            raise OverloadedError(
                "Too many grammars of yours wait to be compiled: send this one again later.", 2.0
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant)
            else:
                self._leave(tenant, turn)
            raise

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and turn in queue:
            queue.remove(turn)
        self._forget_if_idle(tenant)

    def _release(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()
        self._forget_if_idle(tenant)

    def _grant(self) -> None:
        while self._free:
            ready = [tenant for tenant in self._waiting if self._held[tenant] < self._most]
            if not ready:
                return
            tenant = min(ready, key=lambda name: (self._held[name], self._served.get(name, 0)))
            turn = self._waiting[tenant].popleft()
            self._turns += 1
            self._served[tenant] = self._turns
            if not turn.done():
                self._free -= 1
                self._held[tenant] += 1
                turn.set_result(None)
            self._forget_if_idle(tenant)

    def _forget_if_idle(self, tenant: str) -> None:
        """Keep nothing of a tenant who has nothing here: there may be as many as there are
        addresses."""
        if not self._waiting.get(tenant):
            self._waiting.pop(tenant, None)
            if tenant not in self._held:
                self._served.pop(tenant, None)
