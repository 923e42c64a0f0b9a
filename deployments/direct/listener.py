"""The replica's side of direct calls."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from typing_extensions import override

from cfg_core.errors import EngineError
from deployments.direct import protocol
from deployments.direct.address import Address, new_secret
from deployments.direct.protocol import FrameError, FrameReader, frame
from deployments.messages import INTERNAL, Failed

logger = logging.getLogger("ray.serve")

PROOF_LIMIT_S = 5.0
"""Seconds in which a caller must have proved that it knows the secret."""

MAX_UNPROVEN = 1024
"""Connections at a time whose callers have not proved that yet. Beyond it, the oldest is closed.

A burst of requests makes an ingress connect hundreds of times at once. Its proofs take
milliseconds, so the oldest unproven one is not one of them.
"""

BACKLOG = 1024
"""Connections that may wait to be accepted while the event loop is busy."""

AnswerCall = Callable[[Any], AsyncGenerator[Any, None]]
"""Yields the items of a call's answer. Closing the generator aborts the call."""


class CallListener:
    """Takes calls on a port of this process, and answers each with the items of `answer`.

    host: the address to listen on.
    max_calls: calls at a time. One more is refused.

    Used from one event loop.
    """

    def __init__(self, host: str, answer: AnswerCall, max_calls: int) -> None:
        self._host, self._answer, self._max_calls = host, answer, max_calls
        self._secret, self._port = new_secret(), 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Served] = set()
        self._unproven: dict[_Served, None] = {}  # the oldest first
        self._calls: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Served(self), self._host, 0, backlog=BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> Address:
        """Host, port and secret; `start` has been awaited."""
        return Address(self._host, self._port, self._secret)

    async def stop(self) -> None:
        """Refuse further calls, wait until all answers are complete and sent, and close."""
        self._stopping = True
        while self._calls:
            await asyncio.wait(self._calls)
        self.close()

    def close(self) -> None:
        """Close the port and all connections, which aborts the calls that are being answered.

        What was given to the operating system is still sent.
        """
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    # --- for connections --------------------------------------------------------------------------

    def _opened(self, connection: _Served) -> None:
        self._connections.add(connection)
        self._unproven[connection] = None
        if len(self._unproven) > MAX_UNPROVEN:
            next(iter(self._unproven)).close()

    def _proven(self, connection: _Served) -> None:
        self._unproven.pop(connection, None)

    def _closed(self, connection: _Served) -> None:
        self._connections.discard(connection)
        self._unproven.pop(connection, None)

    def _begin(self, connection: _Served, call: bytes) -> asyncio.Task[None] | None:
        """Answer a pickled call; None if this replica takes no call now."""
        if self._stopping or len(self._calls) >= self._max_calls:
            return None
        task = asyncio.ensure_future(self._send_answer(connection, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _send_answer(self, connection: _Served, call: bytes) -> None:
        try:
            async with aclosing(self._answer(pickle.loads(call))) as items:
                async for item in items:
                    await connection.send(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        except Exception:
            logger.exception("Unexpected error in a call.")
            failed = Failed(EngineError(INTERNAL))
            await connection.send(pickle.dumps(failed))
        await connection.end()


class _Served(asyncio.Protocol):
    """One connection of a caller."""

    def __init__(self, listener: CallListener) -> None:
        self._listener = listener
        self._frames = FrameReader(protocol.CHALLENGE_BYTES + protocol.PROOF_BYTES)
        self._challenge = protocol.new_challenge()
        self.is_proven = False
        self._call: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # `send` waits until the system has taken it
        protocol.keep_alive(transport)
        self._transport.write(frame(self._challenge))
        self._limit = asyncio.get_running_loop().call_later(PROOF_LIMIT_S, self.close)
        self._listener._opened(self)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                (self._take_call if self.is_proven else self._take_proof)(payload)
        except FrameError:
            self.close()

    def _take_proof(self, payload: bytes) -> None:
        challenge, given = payload[: protocol.CHALLENGE_BYTES], payload[protocol.CHALLENGE_BYTES :]
        secret = self._listener._secret
        if not protocol.is_proof(given, secret, protocol.CALLER, self._challenge, challenge):
            raise FrameError("The caller does not know the secret.")
        self.is_proven = True
        self._listener._proven(self)
        self._limit.cancel()
        self._frames.max_bytes = protocol.MAX_FRAME_BYTES
        self._transport.write(
            frame(protocol.proof(secret, protocol.LISTENER, self._challenge, challenge))
        )

    def _take_call(self, payload: bytes) -> None:
        if self._call is not None:
            raise FrameError("A call came before the answer to the last one was complete.")
        self._call = self._listener._begin(self, payload)
        if self._call is None:
            self._transport.write(frame(protocol.REFUSED))

    @override
    def pause_writing(self) -> None:
        self._writable.clear()

    @override
    def resume_writing(self) -> None:
        self._writable.set()

    async def send(self, payload: bytes) -> None:
        """Send one frame; wait until the operating system has taken it: until the caller reads."""
        self._transport.write(frame(payload))
        await self._writable.wait()

    async def end(self) -> None:
        self._call = None
        await self.send(protocol.END)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._listener._closed(self)
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        self._transport.abort()
