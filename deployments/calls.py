"""Calls from the ingress to a replica: what comes back, what a failure means, and what cancels a call."""

from __future__ import annotations

import asyncio
import logging
import math
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
from deployments.heartbeat import HEARTBEAT
from deployments.http_errors import DeadlineError

logger = logging.getLogger("ray.serve")

_LOOK_EVERY_S = 0.5
_LOST = "The engine was lost: send the request again."


class _SilentError(EngineDeadError):
    """Nothing was heard of the replica for too long; whether it is dead, nobody knows."""


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
    """The items of a replica's answer to one call, watched: neither silence nor the time allowed may run out.

    silence_s: the longest pause between two signs of life, from when the call was sent to a replica (`dispatch`);
    before that it may wait for one. deadline: of the event loop's clock; None: none.
    """

    def __init__(
        self,
        items: DeploymentResponseGenerator,
        silence_s: float,
        deadline: float | None = None,
        dispatch: Dispatch | None = None,
    ) -> None:
        self._items, self._silence_s = items, silence_s
        self._deadline = math.inf if deadline is None else deadline
        self._dispatch = dispatch or Dispatch()
        self._heard = False

    async def next(self) -> str:
        """The next item that is no heartbeat. StopAsyncIteration at the end.

        Raises CfgServeError: what the replica sent as a value, what Serve raised, EngineDeadError if the replica fell
        silent, DeadlineError if time is up. The call is cancelled then.
        """
        while True:
            try:
                item = await (self._sign_of_life() if self._heard else self._first_sign())
            except _SilentError:
                dispatches.suspect(self._dispatch.replica)
                raise
            except EngineDeadError:
                dispatches.lost(self._dispatch.replica)
                raise
            self._heard = True
            if item != HEARTBEAT:
                return item

    def cancel(self) -> None:
        """Abort the call: its group leaves the engine."""
        self._items.cancel()

    async def _first_sign(self) -> str:
        """Cancelling would take the call back from Serve's router, so time is looked at from beside it."""
        coming = asyncio.ensure_future(next_item(self._items))
        try:
            while not coming.done():
                left_s = self._deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise out_of_time()
                silent_s = time.monotonic() - self._dispatch.at
                if silent_s > self._silence_s:
                    raise _SilentError(_LOST)
                await asyncio.wait({coming}, timeout=min(left_s, _LOOK_EVERY_S))
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                self.cancel()

    async def _sign_of_life(self) -> str:
        silent_at = asyncio.get_running_loop().time() + self._silence_s
        until = min(silent_at, self._deadline)
        try:
            async with asyncio.timeout_at(until) as limit:
                return await next_item(self._items)
        except TimeoutError:
            if not limit.expired():
                raise
            self.cancel()
            raise (_SilentError(_LOST) if until < self._deadline else out_of_time()) from None


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


async def next_item(items: DeploymentResponseGenerator) -> str:
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
