"""Request bodies, read and decoded so that a large body delays only other large bodies."""

# No `from __future__ import annotations` here: Serve may pickle by value what CfgRouter uses.

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from cfg_core.memory import DelayedTrim
from deployments.requests.body import decode_body

LARGE_BYTES = 2**16
"""Bodies up to this size are decoded on the event loop.

Decoding takes about 50 ns a byte, so it blocks the event loop for at most 4 ms.
"""

T = TypeVar("T")


class Bodies:
    """Decodes small bodies at once, and large ones in a thread, one at a time.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self._large = asyncio.Lock()
        self._trim = DelayedTrim()

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the request's body, or raise RequestError if it is not a JSON object."""
        return await self.read_as(request, lambda body: body)

    async def read_as(self, request: Request, make: Callable[[dict[str, Any]], T]) -> T:
        """Return what `make` returns for the request's body, a JSON object.

        `make` may run in a thread. Raises RequestError if the body is not a JSON object, or if
        `make` raises it.
        """
        raw = await request.body()
        if len(raw) <= LARGE_BYTES:
            return make(decode_body(raw))
        async with self._large:
            self._trim.schedule()
            return await asyncio.to_thread(lambda: make(decode_body(raw)))

    async def apart(self, request: Request, work: Callable[[], T]) -> T:
        """Return what `work` returns, which goes through the request's decoded body.

        `work` runs in a thread if the body is large. Raises what `work` raises.
        """
        if len(await request.body()) <= LARGE_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)
