"""The policy by which speculation backs off: how many drafts are worth verifying in a step.

Let `c` be the probability that a draft is accepted if all drafts before it were accepted. Then k
drafts give (1 - c^(k+1)) / (1 - c) tokens per step (Leviathan et al., arXiv 2211.17192, eq. 1).
Such a step costs 1 + k * cost, where 1 is a step without drafts and `cost` is that of one more
draft. Under guidance `c` depends on the request and its scale. So each group has its own estimate
of `c`, and gets the number of drafts with the most tokens for the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_COST = 0.2
"""Cost of drafting and verifying one more draft, in steps without drafts.

At this cost, no draft is worth making if its probability of being accepted is below 0.2.
"""

MEMORY = 0.9
"""Earlier evidence is multiplied by this in each step with drafts, so about ten steps count."""

HOPE = 0.8
HOPE_WEIGHT = 2.0
"""The first estimate of the probability is HOPE, as if HOPE_WEIGHT drafts had been observed."""

PROBE_EVERY = 32
"""One in this many steps without drafts tries a single draft: the text may have become easier."""


def tokens_per_step(chance: float, drafts: int) -> float:
    """Return the expected tokens of a step, including the one that needs no draft."""
    return sum(chance**i for i in range(drafts + 1))


def best_length(chance: float, most: int, cost: float = DRAFT_COST) -> int:
    """Return the number of drafts, from 0 to `most`, that gives the most tokens for the cost.

    If two numbers are equally good, it returns the larger one.
    cost: that of one more draft, in steps without drafts.
    """
    return max(range(most, -1, -1), key=lambda k: tokens_per_step(chance, k) / (1 + cost * k))


def never_pays(most: int, cost: float) -> bool:
    """Return whether drafts cost so much that no text ever gets any.

    This is so if no draft is worth making even at the probability HOPE.
    """
    return best_length(HOPE, most, cost) == 0


@dataclass(slots=True)
class DraftLength:
    """One sequence's estimate of the probability, and its next number of drafts.

    cost: cost of one more draft, in steps without drafts. 0 never backs off.
    kept, tried: weighted counts of accepted drafts, and of drafts up to the first wrong one.
    without: number of steps without drafts in a row.
    """

    cost: float = DRAFT_COST
    kept: float = HOPE * HOPE_WEIGHT
    tried: float = HOPE_WEIGHT
    without: int = 0

    @property
    def chance(self) -> float:
        """Estimated probability that a draft is accepted if all drafts before it were."""
        return self.kept / self.tried

    def observe(self, drafted: int, kept: int) -> None:
        """Record that a step verified `drafted` drafts and accepted the first `kept` of them.

        Drafts after the first wrong one are not counted, because nothing is learnt about them.
        """
        if drafted:
            self.kept = self.kept * MEMORY + kept
            self.tried = self.tried * MEMORY + min(kept + 1, drafted)

    def next(self, most: int) -> int:
        """Return how many drafts the next step should verify, at most `most`.

        Call it once per step.
        """
        if never_pays(most, self.cost):
            return 0
        length = best_length(self.chance, most, self.cost)
        self.without = 0 if length else self.without + 1
        if self.without < PROBE_EVERY:
            return length
        self.without = 0
        return min(1, most)
