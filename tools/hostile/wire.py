"""HTTP without a client library: malformed requests, and connections that are held open."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

READ_BYTES = 65536
PIECE_BYTES = 2**18


def head(method: str, path: str, headers: Mapping[str, str], version: str = "1.1") -> bytes:
    """Return the head of a request, with the empty line at its end."""
    lines = [
        f"{method} {path} HTTP/{version}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass(frozen=True, kw_only=True)
class RawAnswer:
    """An answer as it was received.

    status: 0 if no answer came.
    ending: closed, reset, silent (the time limit was reached), or complete.
    """

    status: int
    headers: str
    body: bytes
    ending: str

    @property
    def kind(self) -> str:
        return str(self.status) if self.status else f"no answer, {self.ending}"


async def exchange(
    host: str, port: int, sent: bytes, limit_s: float, pause_s: float = 0.0
) -> RawAnswer:
    """Send all of `sent` on a new connection, in pieces, and then read one answer.

    Reading ends at the end of the answer or of the connection, or at the time limit.
    """
    received = bytearray()
    ending = "closed"
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await _send(writer, sent, pause_s)
                while piece := await reader.read(READ_BYTES):
                    received += piece
                    if is_complete(bytes(received)):
                        ending = "complete"
                        break
            finally:
                writer.close()
    except TimeoutError:
        ending = "silent"
    except OSError:
        ending = "reset"
    return parsed(bytes(received), ending)


async def _send(writer: asyncio.StreamWriter, sent: bytes, pause_s: float) -> None:
    for at in range(0, len(sent), PIECE_BYTES):
        writer.write(sent[at : at + PIECE_BYTES])
        await writer.drain()
        if pause_s:
            await asyncio.sleep(pause_s)


def is_complete(received: bytes) -> bool:
    """Return whether an answer with a length or with chunks is complete.

    Other answers end with their connection.
    """
    headers, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in headers.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return b"transfer-encoding: chunked" in headers.lower() and body.endswith(b"0\r\n\r\n")


def parsed(received: bytes, ending: str) -> RawAnswer:
    headers, _, body = received.partition(b"\r\n\r\n")
    words = headers.split(b" ", 2)
    is_http = len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit()
    return RawAnswer(
        status=int(words[1]) if is_http else 0,
        headers=headers.decode("latin-1"),
        body=body,
        ending=ending,
    )


class Held:
    """Connections that are held open. `close` ends them all.

    receive_bytes: size of each connection's receive buffer.
    """

    def __init__(self, host: str, port: int, receive_bytes: int | None = None) -> None:
        self._address = (host, port)
        self._receive_bytes = receive_bytes
        self.sockets: list[socket.socket] = []
        self.refused = 0

    async def open(self, first: bytes, limit_s: float = 5.0) -> None:
        """Open a connection, and send `first` on it.

        A connection that cannot be opened is counted in `refused`.
        """
        connection = socket.socket()
        connection.setblocking(False)
        if self._receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                await loop.sock_connect(connection, self._address)
                await loop.sock_sendall(connection, first)
        except (OSError, TimeoutError):
            connection.close()
            self.refused += 1
            return
        self.sockets.append(connection)

    async def drip(self, until: float, pause_s: float = 1.0) -> None:
        """Send one byte on each connection every `pause_s` seconds.

        until: end, as time.monotonic() has it.
        """
        while time.monotonic() < until:
            for connection in self.sockets:
                with suppress(OSError):
                    connection.send(b" ")
            await asyncio.sleep(pause_s)

    def ended(self) -> int:
        """Return how many connections the server has answered or closed.

        It reads what the connections have received.
        """
        return sum(_has_answer(connection) for connection in self.sockets)

    def close(self) -> None:
        for connection in self.sockets:
            connection.close()


def _has_answer(connection: socket.socket) -> bool:
    try:
        connection.recv(READ_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
