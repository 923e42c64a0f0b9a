"""Request bodies, read and decoded so that a large body delays only other large bodies."""

# No `from __future__ import annotations` here: Serve may pickle by value what CfgRouter uses.

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from cfg_core.errors import MediaTypeError
from cfg_core.memory import DelayedTrim
from deployments.requests.body import Copies, decode_body
from deployments.requests.shape import ShapeBounds
from deployments.requests.template_kwargs import check_template_kwargs

LARGE_BYTES = 2**16
"""Bodies up to this size are decoded on the event loop, which blocks it for at most 4 ms."""

JSON = "application/json"

T = TypeVar("T")


def check_media_type(content_type: str) -> None:
    """Raise MediaTypeError if a body of this type is not declared as JSON.

    A browser lets every web page send other types to any server without asking it first. So bodies
    of other types are not read, even if they are JSON.
    """
    declared = content_type.split(";", 1)[0].strip()
    if declared.lower() != JSON:
        found = f"is {declared[:100]}" if declared else "is missing"
        raise MediaTypeError(
            f"The header Content-Type {found}: send `Content-Type: {JSON}`.", "Content-Type"
        )


class Bodies:
    """Decodes small bodies at once, and large ones in a thread, one at a time.

    Used from one event loop. bounds: on the shape of all bodies.
    """

    def __init__(self, bounds: ShapeBounds) -> None:
        self._bounds = bounds
        self._large = asyncio.Lock()
        self._trim = DelayedTrim()

    async def read(self, request: Request, copies: Copies | None = None) -> dict[str, Any]:
        """Return the request's body.

        Raises RequestError if it is not a JSON object, or its shape is beyond the bounds. Raises
        MediaTypeError.

        copies: how often the body's fields are copied; None: they are not.
        """
        check_media_type(request.headers.get("content-type", ""))
        raw = await request.body()

        def decoded() -> dict[str, Any]:
            body = decode_body(raw, self._bounds, copies)
            check_template_kwargs(body)
            return body

        if len(raw) <= LARGE_BYTES:
            return decoded()
        async with self._large:
            self._trim.schedule()
            return await asyncio.to_thread(decoded)

    async def apart(self, request: Request, work: Callable[[], T]) -> T:
        """Return what `work` returns, which goes through the request's decoded body.

        `work` runs in a thread if the body is large.
        """
        if len(await request.body()) <= LARGE_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)
