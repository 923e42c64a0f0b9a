"""Streams for clients of HTTP/1.0 (proxies, too, nginx among them): the end of the connection ends
them.

HTTP/1.0 knows no chunks (RFC 9112, section 6.1: no Transfer-Encoding in an answer to it). uvicorn's
httptools protocol sends them all the same, wherever an answer has no Content-Length. Behind HAProxy
this is not needed.

The one module that looks inside uvicorn for it; tests/contract checks that the names exist.
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
    """A Content-Length that no body exceeds, and that every body reaches."""

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
    """What is to be done with the head of an answer in HTTP/1.0; None for other versions."""
    cycle = getattr(send, "__self__", None)
    if scope.get("http_version") != "1.0" or not all(hasattr(cycle, name) for name in CYCLE_FIELDS):
        return None

    def on_start(message: Message) -> Message:
        headers = list(message.get("headers", ()))
        if any(name.lower() == b"content-length" for name, _ in headers):
            return message
        cycle.chunked_encoding, cycle.expected_content_length = False, _Unbounded()  # type: ignore[union-attr]
        return {**message, "headers": [*headers, (b"connection", b"close")]}

    return on_start
