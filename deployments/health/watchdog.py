"""Ends a replica whose engine is dead, because a dead engine does not recover.

Serve then starts a new replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

logger = logging.getLogger("ray.serve")

_WATCH_INTERVAL_S = 0.2
_FAREWELL_S = 0.5  # the sum is less than RETRY_DELAY_S (replica_client/encoders.py)


async def exit_with_engine(is_dead: Callable[[], bool]) -> None:
    """End this process when `is_dead` says so, after a moment in which running calls report errors.

    Serve alone would notice only after three failed health checks, and would answer with errors
    until then.
    """
    while not is_dead():  # noqa: ASYNC110 - engines offer a flag, no event
        await asyncio.sleep(_WATCH_INTERVAL_S)
    logger.error("The engine is dead, or hangs: this replica exits.")
    await asyncio.sleep(_FAREWELL_S)
    os._exit(1)
