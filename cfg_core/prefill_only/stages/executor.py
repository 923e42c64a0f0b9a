"""Executors run the batches, in the caller's own thread or in a thread that does nothing else.

An executor calls `compute` for each submitted batch, in order, and hands the result to `deliver`.
A batch that fails is delivered with its error, and the executor continues with the next batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from cfg_core.prefill_only.batch import Finished, PackedBatch, Values

Compute = Callable[[PackedBatch], Values]
Deliver = Callable[[Finished], None]


class Executor(Protocol):
    """Runs batches. One thread calls `submit` and `close`."""

    def submit(self, batch: PackedBatch) -> None: ...

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...


def _finish(compute: Compute, batch: PackedBatch) -> Finished:
    try:
        return Finished(batch.sequences, compute(batch))
    except Exception as error:
        return Finished(batch.sequences, {}, error)


class InlineExecutor:
    """Runs each batch in `submit`, which returns when the batch is delivered.

    For offline use and for tests.
    """

    alive = True

    def __init__(self, compute: Compute, deliver: Deliver) -> None:
        self._compute, self._deliver = compute, deliver

    def submit(self, batch: PackedBatch) -> None:
        self._deliver(_finish(self._compute, batch))

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class ThreadExecutor:
    """Runs batches in a device thread, which only copies in, computes and copies out.

    While one batch runs, the engine tokenizes and packs the next one. With two batches in flight,
    the device is never idle. The device thread calls `deliver`.
    """

    def __init__(self, compute: Compute, deliver: Deliver) -> None:
        self._compute, self._deliver = compute, deliver
        self._batches: queue.SimpleQueue[PackedBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefill-only-device", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, batch: PackedBatch) -> None:
        self._batches.put(batch)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._deliver(_finish(self._compute, batch))

    def close(self) -> None:
        """End the thread after the batches in flight; waits 60 seconds at most. Idempotent."""
        self._batches.put(None)
        self._thread.join(timeout=60)
