"""A value that is expensive to ask for, asked a few times a second however many want it."""

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
    """Used from one event loop. One question is under way at most, and all who wait get its answer
    or its error."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[T] | None = None
        self._value: T | None = None
        self._since = -math.inf

    async def value(self) -> T:
        """An answer at most FRESH_S old; one at most OLD_S old, if the next takes longer than
        PATIENCE_S.

        Raises what `ask` raises.
        """
        if self._is_younger(FRESH_S):
            return cast(T, self._value)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._ask_anew())
            self._asked.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # all may have left
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
