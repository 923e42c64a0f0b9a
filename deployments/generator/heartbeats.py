"""Heartbeats before the items of a replica's answer: the replica is at work, and how far it is.

The ingress charges an API key for what the engine did. Before the first item, heartbeats report
this every HEARTBEAT_S. Later, items report it themselves: the first one, the last one, and one in
each HEARTBEAT_S between them. A client that leaves in the middle is charged what was reported last.
The first heartbeat comes sooner: it tells the ingress that the replica has begun with the request
(admission/queue.py, Place.begun). Of an answer that is not streamed, heartbeats also tell what
another replica needs to go on with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace

from deployments.http.text_answers import is_last
from deployments.messages import Chunk, Heartbeat, Whole
from deployments.requests.progress import Progress
from deployments.requests.usage import Usage

FIRST_S, HEARTBEAT_S = 0.05, 0.5


async def with_heartbeats(
    items: AsyncIterator[Chunk | Whole],
    usage: Callable[[], Usage],
    every_s: float = HEARTBEAT_S,
    progress: Callable[[], Progress | None] = lambda: None,
) -> AsyncGenerator[Chunk | Whole | Heartbeat]:
    """Yield `items`, with heartbeats before the first one.

    Before the first item, heartbeats come after FIRST_S and then every `every_s` seconds. The first
    item carries the usage, as do the one that ends a stream and each Whole. Other items carry it if
    the last report is older than `every_s`. If the last item has none, a heartbeat follows. Closing
    this iterator, or cancelling the task that waits for it, first does the same to `items`.
    """
    first = asyncio.ensure_future(_next(items))
    wait_s = min(FIRST_S, every_s)
    try:
        while not (await asyncio.wait({first}, timeout=wait_s))[0]:
            yield Heartbeat(usage(), progress())
            wait_s = every_s
        if (item := first.result()) is not None:
            told = time.monotonic()
            yield (item := _reported(item, usage))
            async for item in items:
                now = time.monotonic()
                if _ends(item) or now - told > every_s:
                    told, item = now, _reported(item, usage)
                yield item
            if item.usage is None:
                yield Heartbeat(usage())
    finally:
        if not first.done():
            first.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await first
        if (close := getattr(items, "aclose", None)) is not None:
            await close()


def _ends(item: Chunk | Whole) -> bool:
    return isinstance(item, Whole) or is_last(item.text)


def _reported(item: Chunk | Whole, usage: Callable[[], Usage]) -> Chunk | Whole:
    return replace(item, usage=usage())


async def _next(items: AsyncIterator[Chunk | Whole]) -> Chunk | Whole | None:
    """The next item; None at the end, because a task cannot end with StopAsyncIteration."""
    return await anext(items, None)
