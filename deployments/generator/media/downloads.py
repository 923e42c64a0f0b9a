"""How many images, audio and video a replica fetches at a time, and what waits for how long.

vLLM starts all downloads of a request together, and answers when the last one has ended, even if
the first one failed. So a request whose hosts send nothing would wait for each of them in turn.
Here the first failure ends the others, and the waits of a request have one limit together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from cfg_core.errors import CapacityError, OverloadedError

T = TypeVar("T")

AT_ONCE, CLIENT_AT_ONCE, REQUEST_AT_ONCE = 32, 8, 4
"""Downloads of a replica, of a client and of a request at a time.

Slow hosts of one client delay no other's.
"""

CLIENT_WAITING = 64
"""Downloads of one client that wait for a turn. Its next ones are refused at once."""

MAX_WAIT_S = 20.0
"""Seconds that the downloads of one request wait for others."""


class ClientDownloads:
    """The downloads of one client: those that run, and the number of those that wait."""

    def __init__(self) -> None:
        self.running = asyncio.Semaphore(CLIENT_AT_ONCE)
        self.waiting = 0


class Downloads:
    """The downloads of one request. None goes on after one has failed."""

    of_replica = asyncio.Semaphore(AT_ONCE)

    def __init__(self, client: ClientDownloads) -> None:
        self._client = client
        self._turns = asyncio.Semaphore(REQUEST_AT_ONCE)
        self._running: set[asyncio.Future[Any]] = set()
        self._failure: Exception | None = None
        self._deadline: float | None = None

    async def run(self, load: Callable[[], Awaitable[T]]) -> T:
        """Call `load` in its turn. Raises what it raises, or what another of the request raised."""
        async with self._turns:
            if self._failure is not None:
                raise self._failure
            running = asyncio.ensure_future(load())
            self._running.add(running)
            try:
                return await running
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._failure is None or (task is not None and task.cancelling()):
                    raise  # the request itself was cancelled
                raise self._failure from None
            except Exception as error:
                self.end(error)
                raise
            finally:
                self._running.discard(running)

    def end(self, failure: Exception) -> None:
        """End all downloads with `failure`; a second call does nothing."""
        if self._failure is None:
            self._failure = failure
            for running in self._running:
                running.cancel()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot of the client and of the replica, and hold them.

        Raises OverloadedError if too many wait, or if the wait is too long.
        """
        if self._client.waiting >= CLIENT_WAITING:
            raise _overloaded("Your requests wait for as many images, audio and video as they may")
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + MAX_WAIT_S
        async with AsyncExitStack() as held:
            self._client.waiting += 1
            try:
                async with asyncio.timeout_at(self._deadline):
                    await held.enter_async_context(self._client.running)
                    await held.enter_async_context(self.of_replica)
            except TimeoutError:
                raise _overloaded(
                    "The server is fetching as many images, audio and video as it can"
                ) from None
            finally:
                self._client.waiting -= 1
            yield


def ended() -> CapacityError:
    """The failure of downloads whose request has ended."""
    return CapacityError("The request has ended.")


def _overloaded(what: str) -> OverloadedError:
    return OverloadedError(
        f"{what}: send the request again later, or send data: addresses.", reason="media"
    )
