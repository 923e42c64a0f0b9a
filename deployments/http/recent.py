"""A cache for one value that is expensive to ask for.

The value is asked for a few times a second at most, however many callers want it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")

FRESH_S = 0.25
PATIENCE_S = 0.25
OLD_S = 5.0


class Recent(Generic[T]):
    """Caches what `ask` returns.

    At most one call of `ask` runs at a time. All callers that wait get its result or its error.
    Used from one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[T] | None = None
        self._value: T | None = None
        self._since = -math.inf

    async def value(self) -> T:
        """A value that is at most FRESH_S old.

        If a new one takes longer than PATIENCE_S, the last value is returned, provided that it is
        at most OLD_S old. Raises what `ask` raises.
        """
        if self._is_younger(FRESH_S):
            return cast(T, self._value)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._ask_anew())
            # Read the error, because all callers may have left: asyncio would log it as never read.
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())
        asked = self._asked
        await asyncio.wait({asked}, timeout=PATIENCE_S)
        if not asked.done() and self._is_younger(OLD_S):
            return cast(T, self._value)
        return await asyncio.shield(asked)

    def _is_younger(self, than_s: float) -> bool:
        return time.monotonic() - self._since < than_s

    async def _ask_anew(self) -> T:
        try:
            self._value = await self._ask()
        except Exception:
            self._since = -math.inf
            raise
        self._since = time.monotonic()
        return self._value
