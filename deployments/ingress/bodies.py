"""Bodies of requests, read and decoded so that a large one holds up nobody but other large ones."""

# No `from __future__ import annotations` here: Serve pickles what CfgRouter uses by value where it
# must.

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from cfg_core.memory import Rest
from deployments.requests.body import decode_body

LARGE_BYTES = 2**16
"""Decoding takes some 50 ns a byte, so the event loop decodes a smaller body within 4 ms."""

T = TypeVar("T")


class Bodies:
    """Decodes small bodies at once, and large ones in a thread, one at a time. Used from one event
    loop."""

    def __init__(self) -> None:
        self._large = asyncio.Lock()
        self._rest = Rest()

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object that is the body. Raises RequestError."""
        return await self.read_as(request, lambda body: body)

    async def read_as(self, request: Request, make: Callable[[dict[str, Any]], T]) -> T:
        """What `make` makes of the JSON object that is the body. `make` may run in a thread.

        Raises RequestError, of the body or of `make`.
        """
        raw = await request.body()
        if len(raw) <= LARGE_BYTES:
            return make(decode_body(raw))
        async with self._large:
            self._rest.after_large_work()
            return await asyncio.to_thread(lambda: make(decode_body(raw)))
