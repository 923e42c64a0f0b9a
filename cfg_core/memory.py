"""Return freed memory that the C library keeps to the operating system.

Tokenizing a text of some megabytes takes hundreds of megabytes, in many small pieces. glibc keeps
the pieces after they are freed, separately for each thread.
"""

from __future__ import annotations

import ctypes
import threading

REST_S = 1.0
"""Seconds to wait after the last large piece of work, whose results are still in use."""

# None if the C library is not glibc.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Return the memory now, without the GIL, so that other threads can run Python meanwhile."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Rest:
    """Returns memory once no large work was done for REST_S seconds; usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def after_large_work(self) -> None:
        with self._lock:
            self.close()
            self._timer = threading.Timer(REST_S, give_back)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Cancel the return of memory that is still to come."""
        if self._timer is not None:
            self._timer.cancel()
