"""The answer of a replica to one call, item by item, with its deadline and its signs of life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from ray.serve.handle import DeploymentResponseGenerator

from cfg_core.errors import DeadlineError, EngineDeadError
from deployments.calls.ray_errors import LOST, next_item
from deployments.messages import Chunk, Heartbeat, Item, Whole
from deployments.requests.usage import Usage
from deployments.routing import shared
from deployments.routing.shared import Dispatch


class Answer:
    """The items of a replica's answer to one call.

    deadline: of the event loop's clock; None: none. dispatch: which replica has the call.
    on_sign: called with the first item, maybe again. usage: what the engine had done for the call
    when the replica last told.
    """

    def __init__(
        self,
        items: DeploymentResponseGenerator[Any],
        deadline: float | None = None,
        dispatch: Dispatch | None = None,
        on_sign: Callable[[], None] = lambda: None,
    ) -> None:
        self._items, self._deadline = items, deadline
        self._dispatch = dispatch or Dispatch()
        self._on_sign = on_sign
        self._heard_at = time.monotonic()
        self._waiting: asyncio.Timeout | None = None
        self._is_lost = False
        self.usage = Usage()

    async def next(self) -> Chunk | Whole:
        """The next chunk of a stream, or piece of a whole answer. StopAsyncIteration at the end.

        Raises CfgServeError: what the replica sent as `Failed`, what Serve raised, EngineDeadError
        if the replica fell silent, DeadlineError if time is up. The call is cancelled then.
        """
        while True:
            try:
                item = await self._item()
            except EngineDeadError:
                note = shared.suspect if self._is_lost else shared.lost
                note(self._dispatch.replica)
                raise
            self._heard_at = time.monotonic()
            self._on_sign()
            if isinstance(item, Chunk | Whole):
                return item
            assert isinstance(item, Heartbeat), item
            self.usage = item.usage

    async def rest(self, first: Whole) -> str:
        """The text of a whole answer, of which `first` has come."""
        pieces = [first.text]
        with suppress(StopAsyncIteration):
            while True:
                pieces.append((await self.next()).text)
        return "".join(pieces)

    def cancel(self) -> None:
        """Abort the call: its group leaves the engine."""
        self._items.cancel()  # type: ignore[no-untyped-call]

    def give_up_if_silent(self, for_s: float) -> None:
        """Let `next` raise EngineDeadError if the replica fell silent.

        That is, if the replica has this call, and neither its beacon nor the call itself gave a
        sign for so long. A call that still waits for a replica is not given up.
        """
        replica, now = self._dispatch.replica, time.monotonic()
        if replica is None or self._is_lost:
            return
        if now - max(self._heard_at, self._dispatch.at) <= for_s:
            return
        if shared.lookout().silent_s(replica) > for_s:
            self._is_lost = True
            if self._waiting is not None and not self._waiting.expired():
                self._waiting.reschedule(asyncio.get_running_loop().time())

    async def _item(self) -> Item:
        if self._is_lost:
            raise EngineDeadError(LOST)
        try:
            async with asyncio.timeout_at(self._deadline) as self._waiting:
                return await next_item(self._items)
        except TimeoutError:
            if self._waiting is None or not self._waiting.expired():
                raise
            self.cancel()
            raise (EngineDeadError(LOST) if self._is_lost else out_of_time()) from None
        finally:
            self._waiting = None


def out_of_time() -> DeadlineError:
    return DeadlineError(
        "The request took longer than its `timeout`: allow more time, or ask for less."
    )


@asynccontextmanager
async def in_time(timeout_s: float | None) -> AsyncIterator[None]:
    """Cancel what is inside after `timeout_s` seconds, and raise DeadlineError. None: never."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise out_of_time() from None
