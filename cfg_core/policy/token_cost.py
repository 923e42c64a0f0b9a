"""What one more token costs a step: measured while the engine runs.

The time of a step that decodes grows with the number of its tokens, from what reading the weights
takes. The slope is found by least squares over the last steps (weighted: recent ones count more).
"""

from __future__ import annotations

from cfg_core.policy.step_times import StepTimes

MEMORY = 0.98
"""Earlier steps are multiplied by this with each further one, so some fifty count."""

UNKNOWN = 0.01
"""The cost of one more token, in steps, where all recent steps had equally many."""

LONGEST = 4.0
"""A step counts as at most so many times the mean: another program may have had the machine."""


class TokenCost:
    """Times of the steps of one engine (see StepTimes), and what they say of one more token."""

    def __init__(self) -> None:
        self._times: StepTimes[int] = StepTimes()
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def begin(self, step: object, tokens: int, now: float) -> None:
        """Note that a step was scheduled that only decodes, and computes so many tokens."""
        self._times.begin(step, tokens, now)

    def end(self, step: object, now: float) -> None:
        """Note that a step has ended, whether or not it was noted when it began."""
        if (ended := self._times.end(step, now)) is not None:
            self._observe(*ended)

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
