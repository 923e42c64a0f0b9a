"""What a replica notices of its own engine: its pulse, and that it is dead."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

from cfg_core.errors import CfgServeError
from cfg_core.stall import Stall

logger = logging.getLogger("ray.serve")

PULSE_S = 0.5

REPORTED_AT = "reported_at_ms"
"""Key in a replica's report: when the report was true, in milliseconds since 1970."""

_WATCH_INTERVAL_S = 0.2
_FAREWELL_S = 0.5  # the sum is less than RETRY_DELAY_S (replica_client/encoders.py)


class Pulse:
    """What an engine last reported of itself; it is asked every PULSE_S.

    ask: asks the engine. Raises CfgServeError if the engine cannot answer.
    timeout_s: seconds without an answer after which the engine counts as hanging. Those in which
        this process did not run do not count: its engine may have answered.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[str, int]]],
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._stall = ask, Stall(timeout_s, now)
        self._num_asked = self._num_answered = 0
        self.stats: dict[str, int] = {}

    def look(self) -> bool:
        """Return whether the engine hangs. Call it several times a second."""
        self._stall.look(self._num_asked, self._num_answered)
        return self._stall.is_stuck

    async def run(self) -> None:
        while True:
            self._num_asked += 1
            try:
                self.stats = {**await self._ask(), REPORTED_AT: int(time.time() * 1000)}
            except CfgServeError as error:  # a dead engine is noticed by its own flag
                logger.warning("The engine did not report its state: %s", error)
            self._num_answered += 1
            await asyncio.sleep(PULSE_S)


async def exit_with_engine(is_dead: Callable[[], bool]) -> None:
    """End this process when `is_dead` says so, because a dead engine does not recover.

    Running calls have a moment to report errors. Serve then starts a new replica. Alone, it would
    notice only after three failed health checks, and would answer with errors until then.
    """
    while not is_dead():  # noqa: ASYNC110 - engines offer a flag, no event
        await asyncio.sleep(_WATCH_INTERVAL_S)
    logger.error("The engine is dead, or hangs: this replica exits.")
    await asyncio.sleep(_FAREWELL_S)
    os._exit(1)
