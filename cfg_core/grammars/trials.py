"""Trials of grammars: what one may cost, who has the next one, and what the last ones said.

Standard library only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cfg_core.errors import OverloadedError

WALL_S = 60.0
"""Seconds of wall-clock time for one trial.

This limit says that the machine is busy, and nothing about the grammar.
"""

MAX_WAITING = 64
"""Number of trials of one tenant that may wait."""

REMEMBERED = 1024
"""Number of verdicts that are remembered, because agents send the same tools again and again."""

COSTLY_S = 60.0
"""Seconds for which a refusal for CPU time, memory or slow masks is remembered.

The next trial may end otherwise, for example on a machine that is less busy.
"""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits on the trials of grammars, which run in forks of a helper process.

    Each field is a key of the section `grammars:` of the YAML, and of the argument `grammars` of
    `guided_engine_args`. They depend on the machine and on the model, or change answers.

    cpu_s: the default is what the slowest of 500 public schemas needs, with a margin. A grammar
        that another compiler may take has less (FIRST_CPU_S in
        vllm_plugin/frontend/grammar_sandbox.py).
    memory_mb: beyond what the helper has.
    """

    cpu_s: float = field(default=12.0, metadata={"gt": 0})
    """CPU seconds that validating and compiling one grammar may take. A request whose grammar takes
    longer gets 400.
    """

    memory_mb: int = field(default=1024, metadata={"ge": 64})
    """MiB of memory that validating and compiling one grammar may take. A request whose grammar
    takes more gets 400.
    """

    mask_ms: float = field(default=50.0, metadata={"gt": 0})
    """CPU milliseconds that a grammar may need in one step to find the tokens that it allows next.
    All requests of the engine wait for this. A grammar that needs more in its trial is refused with
    400. If it later needs more than twice as much, its request ends with an error.
    """

    places: int = field(default=3, metadata={"ge": 1})
    """Maximum number of grammars that a replica compiles at the same time. One tenant may use all
    of these places but one.
    """

    at_start: bool = True
    """Start the compiling process together with the engine, and keep it running. It takes 270 MB of
    memory. If false, the first request with a grammar starts it, and waits about 10 s; without new
    grammars, it ends after 15 minutes.
    """

    json_whitespace: int | None = field(default=12, metadata={"ge": 1})
    """Maximum number of characters of white space in a row that a grammar allows in JSON, outside
    of texts. Small models write newlines until the limit of tokens where a grammar lets them.
    `null` allows any number, as `vllm serve` does.
    """


class FairPlaces:
    """A fixed number of places, shared fairly between tenants.

    The tenant that holds the fewest places gets the next one. Between tenants that hold equally
    many, it goes to the one that was served longest ago. Within a tenant, the order is first come,
    first served. If there are at least two places, one tenant never holds all of them.
    """

    def __init__(self, places: int, max_waiting: int = MAX_WAITING) -> None:
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


class Verdicts:
    """The verdicts on the last grammars. Those that depend on the machine are kept for a minute."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, tuple[dict[str, Any], float]] = OrderedDict()

    def get(self, key: bytes) -> dict[str, Any] | None:
        verdict, until = self._kept.get(key, (None, 0.0))
        if verdict is None or until < time.monotonic():
            return None
        self._kept.move_to_end(key)
        return verdict

    def keep(self, key: bytes, verdict: dict[str, Any]) -> None:
        costly = verdict.get("costly", False)
        self._kept[key] = verdict, time.monotonic() + COSTLY_S if costly else float("inf")
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
