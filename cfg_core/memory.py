"""Give memory back to the system that was freed and that the C library keeps.

A text of some megabytes takes hundreds of megabytes while it is tokenized, in many small pieces.
glibc keeps them when they are freed, for each thread apart.
"""

from __future__ import annotations

import ctypes
import threading

REST_S = 1.0
"""After the last large piece of work: what it made is in use for a while."""

_malloc_trim = getattr(
    ctypes.CDLL(None), "malloc_trim", None
)  # glibc's; other C libraries have none


def give_back() -> None:
    """Do it now. Other threads of the process may run Python meanwhile."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Rest:
    """Gives memory back once nothing large was done for REST_S. For any thread."""

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
        """Drop what is still to be done."""
        if self._timer is not None:
            self._timer.cancel()
