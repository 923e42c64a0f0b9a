"""The pulse of an engine: its replica asks it twice a second, and notices when no answer comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cfg_core.errors import CfgServeError

logger = logging.getLogger("ray.serve")

PULSE_S = 0.5

REPORTED_AT = "reported_at_ms"
"""Key in a replica's report: when the report was true, in milliseconds since 1970."""


class Pulse:
    """What an engine last reported of itself; it is asked every PULSE_S.

    ask: asks the engine. Raises CfgServeError if the engine cannot answer.
    timeout_s: seconds without an answer after which the engine counts as hanging.
    """

    def __init__(self, ask: Callable[[], Awaitable[dict[str, int]]], timeout_s: float) -> None:
        self._ask, self._timeout_s = ask, timeout_s
        self._asked_at = time.monotonic()
        self.stats: dict[str, int] = {}

    @property
    def has_stopped(self) -> bool:
        return time.monotonic() - self._asked_at > self._timeout_s

    async def run(self) -> None:
        """Ask forever."""
        while True:
            self._asked_at = time.monotonic()
            try:
                self.stats = {**await self._ask(), REPORTED_AT: int(time.time() * 1000)}
            except CfgServeError as error:  # a dead engine is noticed by its own flag
                logger.warning("The engine did not report its state: %s", error)
            await asyncio.sleep(PULSE_S)
