"""A replica's answer to one call: its items, its deadline and its signs of life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from cfg_core.errors import CfgServeError, DeadlineError, EngineDeadError
from deployments.direct.connections import ConnectionLostError
from deployments.health.replica_health import Failure, health
from deployments.messages import LOST, Chunk, Failed, Heartbeat, Item, Whole
from deployments.requests.progress import Told
from deployments.requests.usage import Usage
from deployments.routing.dispatches import Dispatch


class Items(Protocol):
    """The items of an answer, whichever way they come."""

    async def next(self) -> Item:
        """The next item. Raises StopAsyncIteration at the end, and CfgServeError."""

    def cancel(self) -> None:
        """Cancel the call, so that its group leaves the engine."""


class LeavingError(Exception):
    """The replica is to stop, and another one can go on with the answer. No client is told."""


class Answer:
    """The items of a replica's answer to one call.

    deadline: by the event loop's clock; None: no deadline.
    dispatch: which replica has the call.
    on_sign: called, without arguments, each time an item arrives.
    told: gets what heartbeats tell of an answer that is not streamed.
    may_leave: whether another replica can go on with that now.
    usage: what the engine had done for the call according to the last report.
    failure: the error that the client of a stream got after its beginning, if any.
    is_complete: nothing more will be read. Until then, ending the request must cancel the call.
    """

    def __init__(
        self,
        items: Items,
        deadline: float | None = None,
        dispatch: Dispatch | None = None,
        on_sign: Callable[[], None] = lambda: None,
        told: Told | None = None,
        may_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self._items, self._deadline = items, deadline
        self._dispatch = dispatch or Dispatch()
        self._on_sign = on_sign
        self._told, self._may_leave = told, may_leave
        self._heard_at = time.monotonic()
        self._waiting: asyncio.Timeout | None = None
        self._is_silent = False
        self.usage = Usage()
        self.is_complete = False
        self.failure: CfgServeError | None = None

    async def next(self) -> Chunk | Whole:
        """Return the next chunk of a stream, or the next piece of a whole answer.

        Raises StopAsyncIteration at the end. Raises CfgServeError: what the replica sent as
        `Failed`, what Serve raised, EngineDeadError if the replica fell silent, DeadlineError if
        the deadline has passed. In the last two cases the call is cancelled, as it is by
        LeavingError.
        """
        while True:
            try:
                item = self._reported(await self._item())
            except EngineDeadError as error:
                may_live = self._is_silent or isinstance(error, ConnectionLostError)
                failure = Failure.SILENT if may_live else Failure.DEAD
                health().failed(self._dispatch.replica, failure)
                raise
            except StopAsyncIteration:
                self.is_complete = True
                raise
            self._heard_at = time.monotonic()
            self._on_sign()
            if isinstance(item, Chunk | Heartbeat) and item.leaves:
                health().leaves(self._dispatch.replica)
            if isinstance(item, Chunk | Whole):
                return item
            if isinstance(item, Heartbeat) and item.leaves and self._may_leave():
                self.cancel()
                raise LeavingError

    def _reported(self, item: Item) -> Item:
        """Keep the usage that `item` reports, and raise the error that it carries."""
        if item.usage is not None:
            self.usage = item.usage
        if isinstance(item, Heartbeat) and self._told is not None:
            self._told.note_heartbeat(item.progress)
        if isinstance(item, Failed):
            self.is_complete = True
            raise item.error
        return item

    async def rest(self, first: Whole) -> str:
        """Return the text of a whole answer whose first piece is `first`."""
        pieces = [first.text]
        with suppress(StopAsyncIteration):
            while True:
                pieces.append((await self.next()).text)
        return "".join(pieces)

    def cancel(self) -> None:
        """Cancel the call, so that its group leaves the engine, unless it is complete."""
        if not self.is_complete:
            self._items.cancel()

    def give_up_if_silent(self, for_s: float) -> None:
        """Make `next` raise EngineDeadError if the replica has been silent for more than `for_s`.

        It is silent if it has this call, and neither its beacon nor the call itself gave a sign in
        so many seconds. A call that still waits for a replica is not given up.
        """
        replica, heard_at = self._dispatch.replica, max(self._heard_at, self._dispatch.at)
        if replica is None or self._is_silent:
            return
        if health().is_silent(replica, heard_at, for_s):
            self._is_silent = True
            if self._waiting is not None and not self._waiting.expired():
                self._waiting.reschedule(asyncio.get_running_loop().time())

    async def _item(self) -> Item:
        if self._is_silent:
            raise EngineDeadError(LOST)
        try:
            async with asyncio.timeout_at(self._deadline) as self._waiting:
                return await self._items.next()
        except TimeoutError:
            if self._waiting is None or not self._waiting.expired():
                raise
            self.cancel()
            raise (EngineDeadError(LOST) if self._is_silent else out_of_time()) from None
        finally:
            self._waiting = None


def out_of_time() -> DeadlineError:
    return DeadlineError(
        "The request took longer than its `timeout`: set a longer one, or make the request smaller."
    )


def deadline_in(timeout_s: float | None) -> float | None:
    """The time in so many seconds, by the event loop's clock; None: never."""
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


@asynccontextmanager
async def in_time(deadline: float | None) -> AsyncIterator[None]:
    """Cancel the code inside at `deadline`, and raise DeadlineError."""
    try:
        async with asyncio.timeout_at(deadline) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise out_of_time() from None
