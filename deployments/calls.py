"""Calls from the ingress to a replica: what comes back, what a failure means, and what cancels a call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi.responses import StreamingResponse
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator
from starlette.types import Receive, Scope, Send

from cfg_core.errors import CfgServeError, EngineDeadError, EngineError, OverloadedError
from deployments import dispatches, sse
from deployments.dispatches import Dispatch
from deployments.http_errors import DeadlineError
from deployments.liveness import lookout
from deployments.usage import Usage

logger = logging.getLogger("ray.serve")

_LOST = "The engine was lost: send the request again."


class EventStream(StreamingResponse):
    """Server-sent events. A client that leaves is no failure, whichever of two ways Serve tells it in.

    `on_end` is called once, however the answer ends; also if it never begins, because the client left just before.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events)
        self._on_end: Callable[[], None] | None = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    async def listen_for_disconnect(self, receive: Receive) -> None:
        with suppress(TaskCancelledError):
            await super().listen_for_disconnect(receive)


class Answer:
    """The items of a replica's answer to one call.

    deadline: of the event loop's clock; None: none. dispatch: which replica has the call, for
    `give_up_if_silent`. on_sign: called with the first item, maybe again. usage: what the engine
    had done for the call when the replica last told.
    """

    def __init__(
        self,
        items: DeploymentResponseGenerator,
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

    async def next(self) -> str:
        """The next text. StopAsyncIteration at the end.

        Raises CfgServeError: what the replica sent as a value, what Serve raised, EngineDeadError if the replica fell
        silent, DeadlineError if time is up. The call is cancelled then.
        """
        while True:
            try:
                item = await self._item()
            except EngineDeadError:
                (dispatches.suspect if self._is_lost else dispatches.lost)(self._dispatch.replica)
                raise
            self._heard_at = time.monotonic()
            self._on_sign()
            if not isinstance(item, Usage):
                return item
            self.usage = item

    async def rest(self, first: str) -> str:
        """`first` and all texts that follow: a whole answer may come in parts (see `sse.parts`)."""
        parts = [first]
        with suppress(StopAsyncIteration):
            while True:
                parts.append(await self.next())
        return "".join(parts)

    def cancel(self) -> None:
        """Abort the call: its group leaves the engine."""
        self._items.cancel()

    def give_up_if_silent(self, for_s: float) -> None:
        """Let `next` raise EngineDeadError if the replica has this call, and for so long neither its beacon nor the
        call itself gave a sign. A call that still waits for a replica is not given up."""
        replica, now = self._dispatch.replica, time.monotonic()
        if replica is None or self._is_lost or now - max(self._heard_at, self._dispatch.at) <= for_s:
            return
        if lookout.silent_s(replica) > for_s:
            self._is_lost = True
            if self._waiting is not None and not self._waiting.expired():
                self._waiting.reschedule(asyncio.get_running_loop().time())

    async def _item(self) -> str | Usage:
        if self._is_lost:
            raise EngineDeadError(_LOST)
        try:
            async with asyncio.timeout_at(self._deadline) as self._waiting:
                return await next_item(self._items)
        except TimeoutError:
            if self._waiting is None or not self._waiting.expired():
                raise
            self.cancel()
            raise (EngineDeadError(_LOST) if self._is_lost else out_of_time()) from None
        finally:
            self._waiting = None


def out_of_time() -> DeadlineError:
    return DeadlineError("The request took longer than its `timeout`: allow more time, or ask for less.")


@asynccontextmanager
async def in_time(timeout_s: float | None) -> AsyncIterator[None]:
    """Cancels what is inside after `timeout_s` seconds, and raises DeadlineError. None: never."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise out_of_time() from None


async def events(answer: Answer, first: str) -> AsyncIterator[str]:
    """The chunks of a stream, to `[DONE]`. A failure before that ends it with an error event; a client that leaves
    cancels the call. A replica that is lost after that has still answered."""
    ended, chunk = False, first
    try:
        while chunk != sse.DONE:
            yield chunk
            chunk = await answer.next()
        ended = True
        yield chunk
    except (CfgServeError, StopAsyncIteration) as error:
        ended = True
        yield sse.error_event(error if isinstance(error, CfgServeError) else EngineDeadError(_LOST))
    finally:
        if not ended:
            answer.cancel()


async def next_item(items: DeploymentResponseGenerator) -> Any:
    """The next item of a replica's answer. Errors arrive as values, or from Serve as exceptions."""
    try:
        item = await anext(items)
    except StopAsyncIteration:
        raise
    except Exception as error:
        raise _own_error(error) from error
    if isinstance(item, CfgServeError):
        raise item
    return item


async def value_of(response: DeploymentResponse) -> Any:
    """The value of a unary call, which is cancelled with its caller."""
    try:
        value = await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:
        raise _own_error(error) from error
    if isinstance(value, CfgServeError):
        raise value
    return value


def _own_error(error: Exception) -> CfgServeError:
    """What Serve and Ray raise, as one of our own."""
    if isinstance(error, BackPressureError):
        return OverloadedError("Too many requests are waiting: try again later.", error.retry_after_s or 1.0)
    if isinstance(error, RayActorError | DeploymentUnavailableError | ReplicaUnavailableError):
        return EngineDeadError(_LOST)
    if isinstance(error, RequestCancelledError):
        return EngineDeadError("The request was cancelled by the server: send it again.")
    logger.error("Unexpected error from a replica.", exc_info=error)
    return EngineError("Internal error: see the server's log.")
