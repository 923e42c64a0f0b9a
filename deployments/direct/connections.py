"""The ingress's side of direct calls."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from typing_extensions import override

from cfg_core.errors import EngineDeadError
from deployments.direct.address import Address
from deployments.direct.frames import (
    END,
    MAX_FRAME_BYTES,
    REFUSED,
    FrameError,
    FrameReader,
    frame,
)
from deployments.direct.proofs import (
    CALLER,
    CHALLENGE_BYTES,
    LISTENER,
    PROOF_BYTES,
    is_proof,
    new_challenge,
    proof,
)
from deployments.messages import LOST, Chunk, GenerateCall, Item

CONNECT_LIMIT_S = 5.0
"""Seconds for connecting and for both proofs."""

UNREACHABLE_S = 30.0
"""Seconds for which an address that could not be reached is not tried again."""

MAX_IDLE = 256
"""Idle connections to one replica that are kept."""

UNREAD_BYTES = 2**18
"""Bytes of an answer that wait to be read, beyond which no more are taken from the connection."""

JOINED_CHARS = 2**16
"""Chunks that have arrived are joined up to about this length."""


class RefusedError(Exception):
    """The replica takes no call now."""


class Connections:
    """Connections to replicas: those that are idle, and which addresses cannot be reached.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[Address, list[_Connection]] = defaultdict(list)
        self._unreachable: dict[Address, float] = {}

    async def begin(
        self, address: Address, call: GenerateCall, on_end: Callable[[], None]
    ) -> DirectItems:
        """Send a call. `on_end` is called once, when it has ended or was cancelled.

        Raises OSError if there is no connection to this address, or if the other side does not
        know the secret. `on_end` is not called then.
        """
        connection = self._idle_to(address) or await self._connect(address)
        items = DirectItems(connection, on_end)
        connection.begin(items, pickle.dumps(call, pickle.HIGHEST_PROTOCOL))
        return items

    def _idle_to(self, address: Address) -> _Connection | None:
        idle = self._idle[address]
        return idle.pop() if idle else None

    async def _connect(self, address: Address) -> _Connection:
        now = time.monotonic()
        if self._unreachable.get(address, now) > now:
            raise ConnectionError(f"{address} could not be reached lately.")
        self._unreachable.pop(address, None)
        connection = _Connection(self, address)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, address.host, address.port
                )
                await connection.proven
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):  # TimeoutError, too
                self._unreachable[address] = now + UNREACHABLE_S
            raise
        return connection

    def _ended(self, connection: _Connection) -> None:
        """The connection has no call any more."""
        idle = self._idle[connection.address]
        if len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def _lost(self, connection: _Connection) -> None:
        idle = self._idle[connection.address]
        if connection in idle:
            idle.remove(connection)
        if not idle:
            del self._idle[connection.address]

    def close(self) -> None:
        """Close the idle connections."""
        for idle in list(self._idle.values()):
            for connection in list(idle):
                connection.close()


class DirectItems:
    """The items of one answer, in the order in which they were sent."""

    def __init__(self, connection: _Connection, on_end: Callable[[], None]) -> None:
        self._connection, self._on_end = connection, on_end
        self._arrived: deque[Item] = deque()
        self._unread = 0
        self._end: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Item:
        """Return the next item. Chunks that have already arrived come joined, as one.

        Raises StopAsyncIteration at the end, RefusedError if the replica takes no call now, and
        EngineDeadError if the connection was lost.
        """
        while not self._arrived:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._joined()
        if not self._arrived:
            self._unread = 0
            self._connection.read_on(self)
        return item

    def _joined(self) -> Item:
        item = self._arrived.popleft()
        if not (isinstance(item, Chunk) and self._arrived):
            return item
        texts, usage, chars = [item.text], item.usage, len(item.text)
        while self._arrived and isinstance(more := self._arrived[0], Chunk):
            if chars > JOINED_CHARS:
                break
            self._arrived.popleft()
            texts.append(more.text)
            chars += len(more.text)
            usage = more.usage or usage
        return replace(item, text="".join(texts), usage=usage)

    def cancel(self) -> None:
        """Cancel the call, if it has not ended."""
        if self._end is None:
            self._connection.close()
            self.ended(EngineDeadError(LOST))

    # --- for the connection -----------------------------------------------------------------------

    def arrived(self, payload: bytes) -> bool:
        """Take an item. Returns whether there is room for more."""
        self._arrived.append(pickle.loads(payload))
        self._unread += len(payload)
        self._wake()
        return self._unread <= UNREAD_BYTES

    def ended(self, end: Exception) -> None:
        """No item follows: `end` is what `next` raises after the last one."""
        if self._end is None:
            self._end = end
            self._wake()
            self._on_end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection to a replica, with at most one call at a time."""

    def __init__(self, pool: Connections, address: Address) -> None:
        self.address = address
        self._pool = pool
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._challenge = new_challenge()
        self._take = self._take_challenge
        self._items: DirectItems | None = None
        self._transport: asyncio.Transport | None = None
        self.proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._frames.max_bytes = CHALLENGE_BYTES
        connected: socket.socket = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._take(payload)
        except FrameError as error:
            self._fail(ConnectionError(str(error)))
            self.close()

    def _take_challenge(self, payload: bytes) -> None:
        self._listeners = payload
        given = proof(self.address.secret, CALLER, payload, self._challenge)
        self._send(self._challenge + given)
        self._frames.max_bytes = PROOF_BYTES
        self._take = self._take_proof

    def _take_proof(self, payload: bytes) -> None:
        if not is_proof(payload, self.address.secret, LISTENER, self._listeners, self._challenge):
            raise FrameError("The listener does not know the secret.")
        self._frames.max_bytes = MAX_FRAME_BYTES
        self._take = self._take_item
        if not self.proven.done():
            self.proven.set_result(None)

    def begin(self, items: DirectItems, call: bytes) -> None:
        self._items = items
        self._send(call)

    def _take_item(self, payload: bytes) -> None:
        items = self._items
        if items is None:
            raise FrameError("An item came without a call.")
        if payload in (END, REFUSED):
            self._items = None
            self.read_on(None)
            self._pool._ended(self)
            items.ended(StopAsyncIteration() if payload == END else RefusedError())
        elif not items.arrived(payload) and self._transport is not None:
            self._transport.pause_reading()

    def read_on(self, items: DirectItems | None) -> None:
        """Take more from the connection, if `items` are those of its call."""
        if self._transport is not None and items is self._items:
            self._transport.resume_reading()

    def _send(self, payload: bytes) -> None:
        assert self._transport is not None, "connected"
        self._transport.write(frame(payload))

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("The connection was closed."))
        self._pool._lost(self)

    def _fail(self, error: Exception) -> None:
        if not self.proven.done():
            self.proven.set_exception(error)
            self.proven.exception()  # seen, also if nobody waits for it
        items, self._items = self._items, None
        if items is not None:
            items.ended(EngineDeadError(LOST))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
