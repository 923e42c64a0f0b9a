"""The pulse of an engine: its replica asks it twice a second, and sees when it stops answering."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cfg_core.errors import CfgServeError

logger = logging.getLogger("ray.serve")

PULSE_S = 0.5

REPORTED_AT = "reported_at_ms"
"""The key in a replica's report that says when it was true, in milliseconds since 1970."""


class Pulse:
    """What an engine last said of itself, asked every PULSE_S. An engine that hangs does not
    answer.

    ask: raises CfgServeError if the engine cannot answer. timeout_s: after which no answer means
    that it hangs.
    """

    def __init__(self, ask: Callable[[], Awaitable[dict[str, int]]], timeout_s: float) -> None:
        self._ask, self._timeout_s = ask, timeout_s
        self._asked_at = time.monotonic()
        self.stats: dict[str, int] = {}

    @property
    def has_stopped(self) -> bool:
        return time.monotonic() - self._asked_at > self._timeout_s

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            self._asked_at = time.monotonic()
            try:
                self.stats = {**await self._ask(), REPORTED_AT: int(time.time() * 1000)}
            except CfgServeError as error:  # a dead engine is noticed by its own flag
                logger.warning("The engine did not tell its state: %s", error)
            await asyncio.sleep(PULSE_S)
