"""What one more token costs a step: measured while the engine runs.

The time of a step that decodes grows with the number of its tokens, from what reading the weights
takes. The slope is found by least squares over the last steps (weighted: recent ones count more).
"""

from __future__ import annotations

from collections import deque

MEMORY = 0.98
"""Earlier steps are multiplied by this with each further one, so some fifty count."""

UNKNOWN = 0.01
"""The cost of one more token, in steps, where all recent steps had equally many."""

IN_FLIGHT = 8
"""The most steps that run at a time. Those that never end are forgotten behind so many others."""

LONGEST = 4.0
"""A step counts as at most so many times the mean: another program may have had the machine."""


class StepCost:
    """Times of the steps of one engine, and what they say of one more token.

    Steps end in the order in which they were begun. A step may be begun while others run: it takes
    from the end of the one before.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[object, int, float]] = deque(maxlen=IN_FLIGHT)
        self._ended = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def begin(self, step: object, tokens: int, now: float) -> None:
        """Note that a step was scheduled that only decodes, and computes so many tokens."""
        self._begun.append((step, tokens, now))

    def end(self, step: object, now: float) -> None:
        """Note that a step has ended, whether or not it was noted when it began."""
        if self._begun and self._begun[0][0] is step:
            _, tokens, begun = self._begun.popleft()
            self._observe(tokens, now - max(begun, self._ended))
        self._ended = now

    def _observe(self, tokens: int, seconds: float) -> None:
        if self._weight:
            seconds = min(seconds, LONGEST * self._seconds / self._weight)
        self._weight = self._weight * MEMORY + 1
        self._tokens = self._tokens * MEMORY + tokens
        self._seconds = self._seconds * MEMORY + seconds
        self._squares = self._squares * MEMORY + tokens * tokens
        self._products = self._products * MEMORY + tokens * seconds

    @property
    def of_a_token(self) -> float:
        """What one more token costs, in steps as they are now: from 0 to 1."""
        spread = self._weight * self._squares - self._tokens**2  # of the tokens, times weight^2
        if spread < self._weight**2 or not self._seconds:
            return UNKNOWN
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread
        return min(1.0, max(0.0, slope * self._weight / self._seconds))
