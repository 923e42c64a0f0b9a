"""A replica that is to stop asks its answers to go on elsewhere, the oldest first.

Serve stops a replica because of a scale-down, a rolling update, or a node that is drained. Answers
have `drain_after_s` to end by themselves. From then on, the chunks of streams ask the ingress to
move them (messages.py, `Chunk.leaves`). It does so once another replica has taken the stream
(replica_client/moves.py). Of an answer that is not streamed, heartbeats ask: it goes on elsewhere
if there is room (replica_client/calls.py). What cannot be moved ends here. Imports neither vllm nor
Ray.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

from deployments.http.text_answers import is_last
from deployments.messages import Chunk, Heartbeat, Item

EACH_S = 0.02
"""Seconds between two answers that are asked to go, so that they arrive in the order of their age
and do not all compute their prompts at once."""

Shutdown: TypeAlias = Callable[[Any], Awaitable[None]]


class Drain:
    """The calls of one replica, and which of them should go on elsewhere.

    `begin` may be called by any thread, the rest is used from one event loop.

    after_s: `drain_after_s` of the YAML; None: nothing is moved.
    """

    def __init__(self, after_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._now = math.inf if after_s is None else after_s, now
        self._began_at = math.inf
        self._calls: dict[object, None] = {}  # the oldest first

    def begin(self) -> None:
        """Note that the replica is to stop. A second call does nothing."""
        self._began_at = min(self._began_at, self._now())

    def enter(self) -> object:
        """Note that a call has come, and return what stands for it here."""
        call = object()
        self._calls[call] = None
        return call

    def leave(self, call: object) -> None:
        """Note that a call has ended, here or because it was moved."""
        self._calls.pop(call, None)

    def marked(self, call: object, item: Item) -> Item:
        """An item of the call's answer, which asks to move it if it is time, and possible."""
        if math.isinf(self._began_at) or not isinstance(item, Chunk | Heartbeat):
            return item
        is_over = isinstance(item, Chunk) and is_last(item.text)
        if is_over or item.progress is None or not self._is_due(call):
            return item
        return replace(item, leaves=True)

    def _is_due(self, call: object) -> bool:
        older = list(self._calls).index(call)
        return self._now() >= self._began_at + self._after_s + older * EACH_S


_drains: list[Drain] = []


def follow(drain: Drain) -> None:
    """Let a drain begin when Serve stops the replica of this process."""
    _drains.append(drain)


def announced(stock: Shutdown) -> Shutdown:
    """Serve's method that stops a replica, which tells the drains of this process first."""

    @functools.wraps(stock)
    async def perform_graceful_shutdown(self: Any) -> None:
        for drain in _drains:
            drain.begin()
        await stock(self)

    return perform_graceful_shutdown
