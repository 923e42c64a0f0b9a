"""Tells who is stuck from who is slow, and from a process that did not run itself.

An event loop watches others so: a device thread, or an engine in another process. Standard library
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_LOOK_S = 1.0
"""Most seconds that count between two looks.

The looks come from an event loop. If they come later, the loop was busy or the process was stopped,
and that says nothing about the others.
"""


class Stall:
    """Seconds for which another one had something to do, and finished nothing.

    limit_s: the seconds after which it is stuck.
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._looked, self._num_done, self._stalled_s = now(), 0, 0.0

    def look(self, num_given: int, num_done: int) -> None:
        """Note how many things the other one was given to do, and how many it has finished.

        Both are counts since the start. Call it several times a second.
        """
        now = self._now()
        passed, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        if num_done == num_given or num_done != self._num_done:
            self._stalled_s = 0.0
        else:
            self._stalled_s += passed
        self._num_done = num_done

    @property
    def is_stuck(self) -> bool:
        return self._stalled_s > self._limit_s
