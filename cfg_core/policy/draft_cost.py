"""What one more draft costs a step: measured while the engine runs.

It depends on the rows of a step, which are its streams. The passes of the drafter take as long for
one row as for a few, and verifying costs by the row. So there is one cost for each power of two of
rows. Now and then a *trial* decides for four steps, whatever the groups would have chosen:

    step                  1        2        3        4        5
    drafts that it makes  none     none     all      all      as groups choose
    drafts it verifies    theirs   none     none     all      all

Steps 2 and 4 are *steady*: they verify as many drafts as they make. With k drafts for each row,
one trial says that a draft costs (time of step 4 / time of step 2 - 1) / k steps. The two are so
close to each other that whatever else the machine does slows both. The median of the last trials
counts, so that a few that were disturbed change nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from cfg_core.policy.draft_length import DRAFT_COST
from cfg_core.policy.step_times import StepTimes

TRIAL = (False, False, True, True)
"""Whether the steps of a trial make all drafts, or none."""

EVERY = 32 * len(TRIAL)
"""One trial in this many steps of a size: trials decide for one step in 32."""

FIRST_EVERY = 32
"""The same until there are ENOUGH trials of this size, so that the constant does not count long."""

ENOUGH = 5
"""With fewer trials, nothing is known of a size."""

KEPT = 15
"""The last trials of a size that count."""

LEAST = 0.01
"""No cost is lower: drafts that are never right must not be made for ever because they are cheap.
"""

APART = TRIAL.index(True)
"""Steps from one steady step of a trial to the other."""


@dataclass(slots=True)
class _Size:
    """One power of two of rows. steps: since the last trial. costs: what trials have found."""

    steps: int = 0
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class DraftCosts:
    """The cost of one more draft by the number of rows, in steps without drafts.

    constant: the cost, if it is not to be measured.
    every: one trial in so many steps of a size.
    """

    def __init__(self, constant: float | None = None, every: int = EVERY) -> None:
        self._constant, self._every = constant, every
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)
        self._times: StepTimes[tuple[int, float]] = StepTimes()
        self._without = (0, 0.0)  # rows and seconds of the last steady step without drafts
        self._age = 0  # steps that have ended since

    def of(self, rows: int) -> float:
        """The cost in a step of so many rows: the constant, the measured one, or DRAFT_COST."""
        if self._constant is not None:
            return self._constant
        size = self._sizes.get(rows.bit_length())
        if size is None or len(size.costs) < ENOUGH:
            return DRAFT_COST
        return max(LEAST, median(size.costs))

    @property
    def measured(self) -> dict[int, float]:
        """The costs that are known, by the smallest number of rows of their size."""
        return {
            2 ** (bits - 1): self.of(2 ** (bits - 1))
            for bits, size in sorted(self._sizes.items())
            if len(size.costs) >= ENOUGH
        }

    def trial_move(self, rows: int) -> bool | None:
        """Whether a step of so many rows makes all drafts or none. None: as the groups choose.

        Call it once for each step that consists of decoding groups alone.
        """
        if self._constant is not None:
            return None
        size = self._sizes[rows.bit_length()]
        every = self._every if len(size.costs) >= ENOUGH else min(FIRST_EVERY, self._every)
        place = size.steps % every - (every - len(TRIAL))
        size.steps += 1
        return TRIAL[place] if place >= 0 else None

    def begin(self, step: object, rows: int, made: int, verified: int) -> None:
        """Note that a step was scheduled that consists of decoding groups alone.

        It takes from the end of the one before, also where it was scheduled later: what the drafter
        had left to do on the device, and the host between the steps, are part of the cost.

        made: the most drafts that it makes for a row.
        verified: drafts that it verifies, of all rows together. It may be less than all, because
            n-grams find less; with less than half the step says nothing.
        """
        if self._constant is None and made * rows / 2 <= verified <= made * rows:
            self._times.begin(step, (rows, verified / rows), 0.0)

    def end(self, step: object, now: float) -> None:
        """Note that any step has ended, whether or not it was noted when it began.

        now: in seconds of any clock.
        """
        ended = self._times.end(step, now)
        self._age += 1
        if ended is None:
            return
        (rows, drafts), seconds = ended
        if not drafts:
            self._without, self._age = (rows, seconds), 0
        elif self._without[0] == rows and self._age <= APART and self._without[1] > 0:
            cost = (seconds / self._without[1] - 1) / drafts
            self._sizes[rows.bit_length()].costs.append(cost)
            self._without = (0, 0.0)
