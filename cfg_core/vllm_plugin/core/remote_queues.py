"""A wait for a worker on another machine ends when the executor has given the worker up.

vLLM waits for the answer of a local worker until it comes or the queue is shut down, as the
executor does when a worker dies. For a worker on another machine it polls without looking again. So
an engine spread over machines that loses a worker hangs, and nobody is told (`tests/serve/chaos.py
--across-nodes --faults worker` shows it). See patches.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

LOOK_EVERY_S = 0.25


def dequeue(stock: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `MessageQueue.dequeue`."""

    @functools.wraps(stock)
    def dequeue(self: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object. timeout: seconds.

        Raises TimeoutError, or RuntimeError once the queue is shut down.
        """
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
