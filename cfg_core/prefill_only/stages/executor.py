"""Who runs the batches: the caller's own thread, or a thread that does nothing else.

An executor calls `compute` for each submitted batch, in order, and hands what came of it to
`deliver`. A batch that fails is delivered with its error; the executor goes on with the next.
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
    """`submit` and `close` are called by one thread."""

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
    """Runs a batch where it is submitted: `submit` returns when it is delivered. For offline use
    and for tests."""

    alive = True

    def __init__(self, compute: Compute, deliver: Deliver) -> None:
        self._compute, self._deliver = compute, deliver

    def submit(self, batch: PackedBatch) -> None:
        self._deliver(_finish(self._compute, batch))

    def close(self) -> None:
        """Nothing to end."""


class ThreadExecutor:
    """A device thread: it copies in, runs, copies out, and nothing else.

    While one batch runs the engine tokenizes and packs the next one, so with two in flight the
    device never waits. `deliver` is called by the device thread.
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
        """Ends the thread after the batches in flight. Idempotent."""
        self._batches.put(None)
        self._thread.join(timeout=60)
