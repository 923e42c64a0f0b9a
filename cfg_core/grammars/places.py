"""Places for trials of grammars, shared fairly between tenants, in pure asyncio."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cfg_core.errors import OverloadedError


class FairPlaces:
    """A fixed number of places, shared fairly between tenants.

    The tenant that holds the fewest places gets the next one. Between tenants that hold equally
    many, it goes to the one that was served longest ago. Within a tenant, the order is first come,
    first served. If there are at least two places, one tenant never holds all of them.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        """max_waiting: how many of each tenant may wait; further ones get OverloadedError."""
        self._free, self._most, self._max_waiting = places, max(1, places - 1), max_waiting
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns, self._served = 0, dict[str, int]()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place for `tenant` while the block runs.

        Raises OverloadedError if too many of this tenant wait. A cancelled wait leaves nothing
        behind.
        """
        await self._take(tenant)
        try:
            yield
        finally:
            self._release(tenant)

    async def _take(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._max_waiting:
            raise OverloadedError(
                f"{len(queue)} grammars of this tenant wait to be compiled, the maximum: send the"
                " request again later.",
                2.0,
                "grammars",
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
        """Forget a tenant that holds no place and waits for none.

        Otherwise memory would grow with the number of client addresses, which may be tenants.
        """
        if not self._waiting.get(tenant):
            self._waiting.pop(tenant, None)
            if tenant not in self._held:
                self._served.pop(tenant, None)
