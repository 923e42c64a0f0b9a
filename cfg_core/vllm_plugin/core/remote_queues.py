"""The wait for a worker on another machine ends when the executor has given that worker up.

The executor shuts the queue down when a worker dies, which ends the wait for a local worker. For
one on another machine, vLLM polls the socket and never checks for a shutdown. So an engine that is
spread over machines hangs when it loses a worker
(`python -m tools.chaos --across-nodes --faults worker`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

LOOK_EVERY_S = 0.25


def dequeue(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `MessageQueue.dequeue`."""

    @functools.wraps(stock)
    def dequeue(self: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object. Raises TimeoutError, or RuntimeError once the queue is shut down."""
        if self._is_local_reader or not self._is_remote_reader:
            return stock(self, timeout, indefinite)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_EVERY_S if end is None else min(LOOK_EVERY_S, end - time.monotonic())
            try:
                return stock(self, left)
            except TimeoutError:
                if self.shutting_down:
                    raise RuntimeError("cancelled") from None
                if end is not None and time.monotonic() >= end:
                    raise

    return dequeue
