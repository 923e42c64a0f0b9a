"""How far a replica's answer is: reports of usage between its texts.

The ingress charges a key for what the engine did. Reports come at least every PROGRESS_S while the
engine computes and nothing is sent, and before the end; so a client that leaves in the middle is
charged for what was done until then. The first one comes sooner: it tells that the replica has
begun with the request (admission.Place.begun).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from deployments.sse import DONE
from deployments.usage import Usage

FIRST_S, PROGRESS_S = 0.05, 0.5


async def with_progress(
    texts: AsyncIterator[str], usage: Callable[[], Usage], every_s: float = PROGRESS_S
) -> AsyncIterator[str | Usage]:
    """`texts` with reports of `usage` between them: after FIRST_S and then each `every_s` before
    the first text, with a text if the last report is older than that, before `[DONE]`, and at the
    end.

    Closing it, or cancelling whoever waits for it, does the same to `texts` first.
    """
    first = asyncio.ensure_future(_next(texts))
    wait_s = min(FIRST_S, every_s)
    try:
        while not (await asyncio.wait({first}, timeout=wait_s))[0]:
            yield usage()
            wait_s = every_s
        if (text := first.result()) is not None:
            yield text
            async for item in _with_reports(texts, usage, every_s):
                yield item
        yield usage()
    finally:
        if not first.done():
            first.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await first
        if (close := getattr(texts, "aclose", None)) is not None:
            await close()


async def _with_reports(
    texts: AsyncIterator[str], usage: Callable[[], Usage], every_s: float
) -> AsyncIterator[str | Usage]:
    told = time.monotonic()
    async for text in texts:
        now = time.monotonic()
        if text == DONE or now - told > every_s:
            told = now
            yield usage()
        yield text


async def _next(texts: AsyncIterator[str]) -> str | None:
    """None at the end: a task cannot end with StopAsyncIteration."""
    return await anext(texts, None)
