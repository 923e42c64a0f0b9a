"""A stream of server-sent events to a client, made from a replica's answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

from fastapi.responses import StreamingResponse
from ray.exceptions import TaskCancelledError
from starlette.types import Receive, Scope, Send

from cfg_core.errors import CfgServeError, EngineDeadError
from deployments.http.text_answers import error_event, is_last
from deployments.messages import LOST, Chunk, Whole


class ChunkSource(Protocol):
    """The chunks of a stream: an Answer, or a MovingStream."""

    is_complete: bool
    failure: CfgServeError | None

    async def next(self) -> Chunk | Whole:
        """The next chunk. Raises CfgServeError, and StopAsyncIteration at the end."""


class EventStream(StreamingResponse):
    """A response of server-sent events.

    A client that leaves is not a failure. Serve tells of it by a disconnect message, or by
    TaskCancelledError.

    on_end: called once, however the answer ends, also if it never begins.
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


async def events(answer: ChunkSource, first: Chunk) -> AsyncIterator[str]:
    """Yield the events of a stream, up to and including its last one, such as `[DONE]`.

    A failure before that ends the stream with an error event. A replica that is lost after the last
    event is not a failure, because its answer is complete. If a client leaves, also before the
    first event, whoever ends the request cancels the call (replica_client/admitted.py).
    """
    text = first.text
    try:
        while not is_last(text):
            yield text
            text = (await answer.next()).text
        answer.is_complete = True
        yield text
    except (CfgServeError, StopAsyncIteration) as error:
        told = error if isinstance(error, CfgServeError) else EngineDeadError(LOST)
        answer.failure = told
        yield error_event(told)
