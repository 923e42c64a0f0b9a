"""A server of uvicorn that bounds the heads of requests while they arrive.

Serve's proxy, and with HAProxy the ingress replicas, run uvicorn with its httptools protocol. It
collects the head of a request, whatever its size and however long it takes, before any code of
Serve or of ours runs: 40 MB of short header lines take a gigabyte, and keep the event loop busy for
seconds. `bounded` makes the protocol that counts the head as it arrives, and ends the connection
with 431 (too large) or 408 (too slow). It also bounds what uvicorn keeps without bounds, too:

- The trailers of a chunked body.
- Requests that are pipelined, which is to say sent before the earlier ones are answered.
- The time in which the rest of a body arrives after its request was answered.

`deployments.serve_patches` puts it in place. No other module subclasses uvicorn's protocol;
tests/contract/test_names.py checks what is overridden and used.
"""

from __future__ import annotations

import asyncio
import json
import os
import re

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cfg_core.errors import ConfigError
from deployments.http.errors import error_body
from deployments.proxy.head_bounds import HeadBounds, HeadCount, HeadTooLargeError

MAX_PIPELINED = 64
"""Requests that one connection may have sent before the first of them is answered."""

LINGER_S = 2.0
"""Seconds in which what still arrives is dropped after a refusal.

If the connection were closed at once, the client would get a reset before it reads the answer.
"""

_IDLE, _HEAD, _BODY = range(3)

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*", re.IGNORECASE)

_REFUSALS = {400: "BadRequestError", 408: "timeout_error", 431: "invalid_request_error"}


def bounded(original: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    """The protocol in place of `original`, with the bounds that the environment sets.

    Raises ConfigError for a wrong variable, or if uvicorn would use another parser.
    """
    if original is not HttpToolsProtocol:
        raise ConfigError(f"uvicorn would use {original.__name__}: install httptools.")
    bounds = HeadBounds.of(os.environ)
    return type("BoundedHeads", (BoundedHeads,), {"bounds": bounds})


class BoundedHeads(HttpToolsProtocol):
    """One connection, whose heads are counted while they arrive.

    uvicorn calls `on_...` for each part of a message, from within `data_received`. What they raise
    ends in `send_400_response`.
    """

    bounds = HeadBounds()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._part = _IDLE  # of the message that is arriving
        self._count = HeadCount(self.bounds)
        self._is_refused = self._brought_body = False
        self._deadline: asyncio.TimerHandle | None = None
        self._begin_deadline()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        part, count, self._brought_body = self._part, self._count, False
        super().data_received(_without_upgrade(data) if part == _IDLE else data)
        is_same_part = part == self._part and count is self._count
        if self._part == _HEAD or (is_same_part and part == _IDLE):  # idle: empty lines came
            self._begin_deadline()
        if is_same_part and part != _IDLE and not self._brought_body:
            self._inside_head(len(data))

    def _inside_head(self, num_bytes: int) -> None:
        """Count a read that ended in the head or among the trailers in which it began."""
        if self._is_refused:
            return
        try:
            self._count.read(num_bytes)
        except HeadTooLargeError as error:
            self._refuse(431, str(error))

    # --- parts of a message, as uvicorn tells them ------------------------------------------------

    @override
    def on_message_begin(self) -> None:
        self._part, self._count = _HEAD, HeadCount(self.bounds)
        super().on_message_begin()

    @override
    def on_url(self, url: bytes) -> None:
        self._count.request_line(len(url))
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._count.line(len(name) + len(value))
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._part = _BODY
        self._end_deadline()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._count.refuse(f"More than {MAX_PIPELINED} requests wait on this connection.")

    @override
    def on_body(self, body: bytes) -> None:
        self._brought_body = True
        self._count.body(len(body))
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._part = _IDLE
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._part == _BODY and self.cycle.response_complete:
            self._begin_deadline()

    @override
    def _should_upgrade_to_ws(self) -> bool:
        """No route here is a websocket. uvicorn would never answer a POST that asks for one."""
        return False

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """A request whose header Upgrade was not taken out is answered in HTTP/1.1, too.

        Its body is empty, because httptools reads nothing behind such a head.
        """

    # --- the deadline -----------------------------------------------------------------------------

    def _begin_deadline(self) -> None:
        if self._deadline is None and not self._is_refused:
            self._deadline = self.loop.call_later(self.bounds.timeout_s, self._late)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.flow.read_paused:
            self._begin_deadline()
        elif self._part == _HEAD:
            limit = f"{self.bounds.timeout_s:g} s"
            self._refuse(408, f"The head of the request did not arrive within {limit}.")
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    # --- refusals ---------------------------------------------------------------------------------

    @override
    def send_400_response(self, msg: str) -> None:
        """Called by `data_received` if the message is ill-formed, or if a bound was exceeded."""
        if self._count.refusal:
            self._refuse(431, self._count.refusal)
        else:
            self._refuse(400, "The request is not well-formed HTTP: send HTTP/1.1.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer if no other answer is being sent, and end the connection."""
        self._is_refused = True
        self._end_deadline()
        if self.transport.is_closing():
            return
        if not self._may_answer():
            self.transport.close()
            return
        self.transport.write(_answer(status, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _may_answer(self) -> bool:
        """Whether the next answer on this connection is that to the message at fault."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return cycle.more_body and not cycle.response_started and not self.pipeline


def _without_upgrade(data: bytes) -> bytes:
    """Take the header Upgrade out of a head at the start of `data`.

    A server may ignore it (RFC 9110, 7.8). Java's HttpClient sends it with each POST, to ask for
    HTTP/2, and httptools would not read the body. A head that arrives in pieces is left as it is.
    """
    end = data.find(b"\r\n\r\n")
    if _UPGRADE.search(data, 0, end if end >= 0 else len(data)) is None:
        return data
    head, rest = (data[:end], data[end:]) if end >= 0 else (data, b"")
    return _UPGRADE.sub(b"", head) + rest


def _answer(status: int, message: str) -> bytes:
    body = json.dumps(error_body(message, status, _REFUSALS[status])).encode()
    lines = [
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    return STATUS_LINE[status] + b"\r\n".join([*lines, b"", body])
