"""End streams to HTTP/1.0 clients by closing the connection.

HTTP/1.0 has no chunked encoding (RFC 9112, section 6.1: no Transfer-Encoding in an answer to it).
But uvicorn's httptools protocol sends chunks whenever an answer has no Content-Length. Proxies such
as nginx may speak HTTP/1.0, too. Behind HAProxy this module is not needed.

No other module uses these private names of uvicorn. tests/contract checks that they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Message, Scope, Send

PRIVATE = {
    "uvicorn.protocols.http.httptools_impl:RequestResponseCycle": ("send",),
}
CYCLE_FIELDS = ("chunked_encoding", "expected_content_length")


class _Unbounded(int):
    """A Content-Length for bodies of unknown size: for uvicorn, every body has this length.

    uvicorn compares the size of a body with it, subtracts that size, and compares the rest with 0.
    """

    def __lt__(self, other: Any) -> bool:
        return False

    def __sub__(self, other: Any) -> _Unbounded:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def end_by_closing(scope: Scope, send: Send) -> Callable[[Message], Message] | None:
    """A function that changes the head of an answer to HTTP/1.0; None for other versions.

    send: uvicorn's. The function changes the state of the uvicorn object behind it.
    """
    cycle = getattr(send, "__self__", None)
    if scope.get("http_version") != "1.0" or not all(hasattr(cycle, name) for name in CYCLE_FIELDS):
        return None

    def on_start(message: Message) -> Message:
        headers = list(message.get("headers", ()))
        if any(name.lower() == b"content-length" for name, _ in headers):
            return message
        cycle.chunked_encoding, cycle.expected_content_length = (  # type: ignore[union-attr]
            False,
            _Unbounded(),
        )
        return {**message, "headers": [*headers, (b"connection", b"close")]}

    return on_start
