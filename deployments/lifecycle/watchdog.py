"""A dead engine does not come back: its replica leaves at once, and Serve starts another."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

logger = logging.getLogger("ray.serve")

_WATCH_INTERVAL_S = 0.2
_FAREWELL_S = 0.5  # with the line above, less than RETRY_DELAY_S (encoders.py)


async def exit_with_engine(is_dead: Callable[[], bool]) -> None:
    """End this process when `is_dead` says so; running calls have a moment to tell their errors.

    Serve alone would notice after three failed health checks, and answer with errors until then.
    """
    while not is_dead():  # noqa: ASYNC110 - engines offer a flag, no event
        await asyncio.sleep(_WATCH_INTERVAL_S)
    logger.error("The engine is dead, or hangs: this replica exits.")
    await asyncio.sleep(_FAREWELL_S)
    os._exit(1)
