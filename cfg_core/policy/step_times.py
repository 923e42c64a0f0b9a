"""How long the steps of an engine take, where several are in flight at a time."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

IN_FLIGHT = 8
"""The most steps that run at a time. Those that never end are forgotten behind so many others."""

Note = TypeVar("Note")


class StepTimes(Generic[Note]):
    """Steps that were begun, each with a note, and what each has taken when it ends.

    Steps end in the order in which they were begun. A step may be begun while others run: it takes
    from the end of the one before. A step whose end nobody tells is forgotten when a later one
    ends.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[object, Note, float]] = deque(maxlen=IN_FLIGHT)
        self._ended = 0.0

    def begin(self, step: object, note: Note, now: float) -> None:
        """Note that a step was scheduled at `now`, in seconds of any clock that never goes back."""
        self._begun.append((step, note, now))

    def end(self, step: object, now: float) -> tuple[Note, float] | None:
        """A step's note, and the seconds that it took; None if its begin was not noted."""
        place = next((i for i, (begun, *_) in enumerate(self._begun) if begun is step), None)
        found = None
        if place is not None:
            for _ in range(place):
                self._begun.popleft()
            _, note, begun_at = self._begun.popleft()
            found = note, now - max(begun_at, self._ended)
        self._ended = now
        return found
