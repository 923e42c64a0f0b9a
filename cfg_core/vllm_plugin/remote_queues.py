"""Waiting for a worker on another machine ends when the executor has given it up. A fault of vLLM 0.32, mended.

vLLM waits for the answer of a local worker until it comes or the queue is shut down, as the executor does when a worker
dies; but for one that comes from another machine it polls without looking again. So an engine spread over machines that
loses a worker hangs, and nobody is told (`tests/serve/chaos.py --across-nodes --faults worker` shows it).
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

PRIVATE_NAMES = (
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.dequeue",
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.shutting_down",
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue._is_local_reader",
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue._is_remote_reader",
)

LOOK_EVERY_S = 0.25

_dequeue = MessageQueue.dequeue


def mend() -> None:
    """In the engine's process. Idempotent."""
    MessageQueue.dequeue = dequeue


def dequeue(self: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> Any:
    """The next object. timeout: seconds. Raises TimeoutError, or RuntimeError once the queue is shut down."""
    if self._is_local_reader or not self._is_remote_reader:
        return _dequeue(self, timeout, indefinite)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_EVERY_S if end is None else min(LOOK_EVERY_S, end - time.monotonic())
        try:
            return _dequeue(self, left)
        except TimeoutError:
            if self.shutting_down:
                raise RuntimeError("cancelled") from None
            if end is not None and time.monotonic() >= end:
                raise
