"""Signs of life between a replica and the ingress, inside the answer itself.

A replica that hangs, a node that died and a cut link look alike from the ingress: nothing comes. Ray notices after
its own health checks, tens of seconds later. So a replica sends a heartbeat in each silence of HEARTBEAT_S, and the
ingress gives up on a call that was sent to a replica and of which it then hears nothing for longer than it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeVar

HEARTBEAT = ""
"""An item of an answer that says nothing but that its replica lives."""

HEARTBEAT_S = 0.5

T = TypeVar("T")


async def with_heartbeats(items: AsyncIterator[T], every_s: float = HEARTBEAT_S) -> AsyncIterator[T | str]:
    """`items`, with a HEARTBEAT whenever `every_s` pass without one.

    Closing it, or cancelling whoever waits for it, does the same to `items` first.
    """
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(_next(items))
            while not coming.done():
                await asyncio.wait({coming}, timeout=every_s)
                if not coming.done():
                    yield HEARTBEAT
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
        if (close := getattr(items, "aclose", None)) is not None:
            await close()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)
