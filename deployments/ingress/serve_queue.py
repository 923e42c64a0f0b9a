"""How much of an answer the client has not taken yet, read from Ray Serve's internal queue.

Behind Serve's own proxy, `send` of an ASGI application puts messages on a queue without a bound.
The proxy takes them from there as fast as the client reads. If the client does not read and the
application does not look at that queue, the queue grows to the whole answer. Behind HAProxy, `send`
is uvicorn's, which waits by itself.

This is the only module that looks inside Ray Serve 2.60 for this purpose. tests/contract checks
that the names exist.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sized
from types import FunctionType
from typing import Any

from starlette.types import Send

PRIVATE = {"ray.serve._private.http_util:MessageQueue": ("put_nowait", "get_messages_nowait")}

QUEUE, MESSAGES = "result_queue", "_message_queue"
"""The variable that Serve's `send` closes over, and the attribute that is the queue's deque."""

FULL, ROOM = 64, 16
"""At FULL messages in the queue the application waits, until no more than ROOM are left."""

LOOK_EVERY_S = 0.05
MAX_WRAPPERS = 4


def queue_behind(send: Send) -> Sized | None:
    """The messages that Serve's proxy has not taken yet; None where `send` itself waits.

    Starlette's own middleware wraps `send` in functions. Each of them closes over the function that
    it wraps, under the name `send`.
    """
    inner: Any = send
    for _ in range(MAX_WRAPPERS):
        if not inspect.isfunction(inner):
            return None
        variables = _closed_over(inner)
        if QUEUE in variables:
            return getattr(variables[QUEUE], MESSAGES, None)
        inner = variables.get("send")
    return None


def _closed_over(function: FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that it uses (inspect.getclosurevars is slow)."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


async def room(queue: Sized | None) -> None:
    """Wait until the queue has room; None always has."""
    if queue is not None and len(queue) >= FULL:
        while len(queue) > ROOM:  # noqa: ASYNC110 - Serve's queue has no event for this
            await asyncio.sleep(LOOK_EVERY_S)
