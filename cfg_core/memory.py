"""Return freed memory to the operating system, and look for garbage rarely while a process starts.

Tokenizing a text of some megabytes takes hundreds of megabytes, in many small pieces. glibc keeps
the pieces after they are freed, separately for each thread.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STARTING = (100_000, 20, 100)
"""Thresholds of Python's garbage collector while a process starts; its own are 700, 10 and 10."""

TRIM_DELAY_S = 1.0
"""Seconds to wait after the last large piece of work, whose results are still in use."""

# None if the C library is not glibc.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


@contextmanager
def quick_start() -> Iterator[None]:
    """While open, Python looks for garbage rarely. For imports and the loading of a model.

    What they make stays: importing vLLM makes a million objects. To look among them for garbage
    again and again takes a quarter of the import, 4 of 17 seconds on a slow CPU.
    """
    before = gc.get_threshold()
    gc.set_threshold(*STARTING)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def trim() -> None:
    """Return the memory now, without the GIL, so that other threads can run Python meanwhile."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class DelayedTrim:
    """Returns memory after TRIM_DELAY_S seconds without large work; usable from any thread.

    collects: first free what only cycles of objects hold, such as an error and its frames. That
    stops the process for half a second per million objects that are not frozen (gc.freeze).
    """

    def __init__(self, collects: bool = False) -> None:
        self._collects = collects
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def schedule(self) -> None:
        """Return memory TRIM_DELAY_S seconds from now, unless this is called again before."""
        with self._lock:
            self.close()
            self._timer = threading.Timer(TRIM_DELAY_S, self._return)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Cancel the return of memory that is still to come."""
        if self._timer is not None:
            self._timer.cancel()

    def _return(self) -> None:
        if self._collects:
            gc.collect()
        trim()
