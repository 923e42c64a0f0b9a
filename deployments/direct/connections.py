"""The ingress's side of direct calls."""

from __future__ import annotations

import asyncio
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import cast

from typing_extensions import override

from cfg_core.errors import EngineDeadError
from deployments.direct import protocol
from deployments.direct.address import Address
from deployments.direct.protocol import FrameError, FrameReader, frame
from deployments.health.replica_health import Failure, health
from deployments.messages import LOST, Chunk, GenerateCall, Item, joined

CONNECT_LIMIT_S = 5.0
"""Seconds for connecting and for both proofs."""

MAX_IDLE = 256
"""Idle connections to one replica that are kept."""

UNREAD_BYTES = 2**18
"""Bytes of an answer that wait to be read, beyond which no more are taken from the connection."""

JOINED_CHARS = 2**16
"""Chunks that have arrived are joined up to about this length."""


class NotTakenError(Exception):
    """The replica did not take the call, which may be sent again, by another way."""


class ConnectionLostError(EngineDeadError):
    """The connection was lost within an answer. The replica may be well."""


class Connections:
    """Connections to replicas, those that are idle. Used from one event loop."""

    def __init__(self) -> None:
        self._idle: defaultdict[Address, list[_Connection]] = defaultdict(list)

    async def begin(
        self,
        replica: Hashable,
        address: Address,
        call: GenerateCall,
        on_taken: Callable[[], None],
        on_end: Callable[[], None],
    ) -> DirectItems:
        """Send a call, over an idle connection or a new one; connecting may take CONNECT_LIMIT_S.

        on_taken: called when the first item shows that the replica has taken the call.
        on_end: called once, when the call has ended, was refused, or was cancelled.

        Raises OSError if no connection can be made, or if the other side does not know the secret,
        and FrameError if the call is too large. Neither function is called then.
        """
        payload = frame(pickle.dumps(call, pickle.HIGHEST_PROTOCOL))
        connection = self._idle_to(address) or await self._connect(replica, address)
        items = DirectItems(connection, on_taken, on_end)
        connection.begin(items, payload)
        return items

    def _idle_to(self, address: Address) -> _Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.is_closing:
                return connection
        return None

    async def _connect(self, replica: Hashable, address: Address) -> _Connection:
        if not health().may_connect(replica):
            raise ConnectionError(f"{address} could not be reached lately.")
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
                health().failed(replica, Failure.UNREACHABLE)
            raise
        health().connected(replica)
        return connection

    def _ended(self, connection: _Connection) -> None:
        """The connection has no call any more."""
        idle = self._idle[connection.address]
        if len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def _lost(self, connection: _Connection) -> None:
        idle = self._idle.get(connection.address, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.address, None)

    def close(self) -> None:
        for idle in list(self._idle.values()):
            for connection in list(idle):
                connection.close()


class DirectItems:
    """The items of one answer, in the order in which they were sent."""

    def __init__(
        self,
        connection: _Connection,
        on_taken: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._connection, self._on_taken, self._on_end = connection, on_taken, on_end
        self._is_taken = False
        self._arrived: deque[Item] = deque()
        self._unread = 0
        self._end: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Item:
        """Return the next item. Chunks that have already arrived come joined, as one.

        Raises StopAsyncIteration at the end, NotTakenError if the replica did not take the call,
        and ConnectionLostError if the connection was lost later.
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
        chunks, chars = [item], len(item.text)
        while self._arrived and isinstance(more := self._arrived[0], Chunk):
            if chars > JOINED_CHARS:
                break
            self._arrived.popleft()
            chunks.append(more)
            chars += len(more.text)
        return joined(chunks)

    def cancel(self) -> None:
        if self._end is None:
            self._connection.close()
            self.ended(ConnectionLostError(LOST))

    # --- for the connection -----------------------------------------------------------------------

    def arrived(self, payload: bytes) -> bool:
        """Take an item. Returns whether there is room for more."""
        if not self._is_taken:
            self._is_taken = True
            self._on_taken()
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

    def lost(self) -> None:
        self.ended(ConnectionLostError(LOST) if self._is_taken else NotTakenError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection to a replica, with at most one call at a time."""

    def __init__(self, pool: Connections, address: Address) -> None:
        self.address = address
        self._pool = pool
        self._frames = FrameReader(protocol.CHALLENGE_BYTES)
        self._challenge = protocol.new_challenge()
        self._take = self._take_challenge
        self._items: DirectItems | None = None
        self._transport: asyncio.Transport | None = None
        self.proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        protocol.keep_alive(transport)
        protocol.limit_unacknowledged(transport)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._take(payload)
        except FrameError as error:
            self._fail(ConnectionError(str(error)))
            self.close()

    def _take_challenge(self, payload: bytes) -> None:
        self._listener_challenge = payload
        given = protocol.proof(self.address.secret, protocol.CALLER, payload, self._challenge)
        self._write(frame(self._challenge + given))
        self._frames.max_bytes = protocol.PROOF_BYTES
        self._take = self._take_proof

    def _take_proof(self, payload: bytes) -> None:
        challenges = self._listener_challenge, self._challenge
        if not protocol.is_proof(payload, self.address.secret, protocol.LISTENER, *challenges):
            raise FrameError("The listener does not know the secret.")
        self._frames.max_bytes = protocol.MAX_FRAME_BYTES
        self._take = self._take_item
        if not self.proven.done():
            self.proven.set_result(None)

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def begin(self, items: DirectItems, payload: bytes) -> None:
        """Send the frame of a call, and give what comes back to `items`."""
        self._items = items
        self._write(payload)

    def _take_item(self, payload: bytes) -> None:
        items = self._items
        if items is None:
            raise FrameError("An item came without a call.")
        if payload in (protocol.END, protocol.REFUSED):
            self._items = None
            self.read_on(None)
            self._pool._ended(self)
            items.ended(StopAsyncIteration() if payload == protocol.END else NotTakenError())
        elif not items.arrived(payload) and self._transport is not None:
            self._transport.pause_reading()

    def read_on(self, items: DirectItems | None) -> None:
        """Take more from the connection, unless it has another call than `items` by now."""
        if self._transport is not None and items is self._items:
            self._transport.resume_reading()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None, "connected"
        self._transport.write(data)

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
            items.lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
