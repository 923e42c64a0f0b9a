"""A dead engine does not come back: its replica leaves at once, and Serve starts another."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

from cfg_core.errors import CfgServeError
from deployments.fleet import REPORTED_AT

logger = logging.getLogger("ray.serve")

_WATCH_INTERVAL_S = 0.2
_FAREWELL_S = 0.5  # with the line above, less than RETRY_DELAY_S (encoders.py)

PULSE_S = 0.5


async def exit_with_engine(is_dead: Callable[[], bool]) -> None:
    """End this process when `is_dead` says so; running calls have a moment to tell their errors.

    Serve alone would notice after three failed health checks, and answer with errors until then.
    """
    while not is_dead():  # noqa: ASYNC110 - engines offer a flag, no event
        await asyncio.sleep(_WATCH_INTERVAL_S)
    logger.error("The engine is dead, or hangs: this replica exits.")
    await asyncio.sleep(_FAREWELL_S)
    os._exit(1)


class Pulse:
    """What an engine last said of itself, asked every PULSE_S. An engine that hangs does not answer.

    ask: raises CfgServeError if the engine cannot answer. timeout_s: after which no answer means that it hangs.
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
