"""How much of an answer its client has not taken yet: what Serve knows of that, and does not tell.

Behind Serve's own proxy, `send` of an ASGI application puts messages on a queue without a bound,
from which the proxy takes them as fast as the client reads. An application that does not look at
that queue holds the whole answer of a client that does not read. Behind HAProxy, `send` is
uvicorn's, which waits by itself.

The one module that looks inside Ray Serve 2.60 for it; tests/contract checks that the names exist.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sized
from typing import Any

from starlette.types import Send

PRIVATE = {"ray.serve._private.http_util:MessageQueue": ("put_nowait", "get_messages_nowait")}

QUEUE, MESSAGES = "result_queue", "_message_queue"
"""The variable that Serve's `send` closes over, and the queue's own deque."""

FULL, ROOM = 64, 16
"""Messages after which the application waits, and down to which it does."""

LOOK_EVERY_S = 0.05
MAX_WRAPPERS = 4


def queue_behind(send: Send) -> Sized | None:
    """The messages that Serve's proxy has not taken yet; None where `send` itself waits.

    Starlette's own middleware wraps `send` in functions that close over the one they wrap, as
    `send`.
    """
    inner: Any = send
    for _ in range(MAX_WRAPPERS):
        if not inspect.isfunction(inner):
            return None
        variables = inspect.getclosurevars(inner).nonlocals
        if QUEUE in variables:
            return getattr(variables[QUEUE], MESSAGES, None)
        inner = variables.get("send")
    return None


async def room(queue: Sized | None) -> None:
    """Return when the queue has room. None has."""
    if queue is not None and len(queue) >= FULL:
        while len(queue) > ROOM:  # noqa: ASYNC110 - Serve's queue tells nobody that it was emptied
            await asyncio.sleep(LOOK_EVERY_S)
