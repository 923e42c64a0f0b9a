"""The policy by which speculation backs off: how many drafts are worth verifying in a step.

The acceptance rate `a` is the probability that a draft is accepted if all drafts before it were
accepted. Then k drafts give (1 - a^(k+1)) / (1 - a) tokens per step (Leviathan et al., arXiv
2211.17192, eq. 1). Such a step costs 1 + k * cost, where 1 is a step without drafts and `cost` is
that of one more draft. Under guidance `a` depends on the request and its scale. So each group has
its own estimate of `a`, and gets the number of drafts with the most tokens for the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_COST = 0.2
"""Cost of drafting and verifying one more draft, in steps without drafts, while none is measured.

At this cost, no draft is worth making if the acceptance rate is below 0.2.
"""

MEMORY = 0.9
"""Earlier evidence is multiplied by this in each step with drafts, so about ten steps count."""

PRIOR = 0.8
PRIOR_WEIGHT = 2.0
"""The first estimate is PRIOR, as if PRIOR_WEIGHT drafts had been observed."""

PROBE_EVERY = 32
"""One in this many steps without drafts tries a single draft: the text may have become easier."""


def tokens_per_step(rate: float, drafts: int) -> float:
    """Return the expected tokens of a step, including the one that needs no draft."""
    return sum(rate**i for i in range(drafts + 1))


def best_length(rate: float, most: int, cost: float = DRAFT_COST) -> int:
    """Return the number of drafts, from 0 to `most`, that gives the most tokens for the cost.

    If two numbers are equally good, it returns the larger one.
    cost: that of one more draft, in steps without drafts.
    """
    return max(range(most, -1, -1), key=lambda k: tokens_per_step(rate, k) / (1 + cost * k))


def never_pays(most: int, cost: float) -> bool:
    """Return whether drafts cost so much that no text ever gets any.

    This is so if no draft is worth making even at the acceptance rate PRIOR.
    """
    return best_length(PRIOR, most, cost) == 0


@dataclass(slots=True)
class DraftLength:
    """One sequence's estimate of the acceptance rate, and its next number of drafts.

    accepted, tried: weighted counts of accepted drafts, and of drafts up to the first wrong one.
    without: number of steps without drafts in a row.
    """

    accepted: float = PRIOR * PRIOR_WEIGHT
    tried: float = PRIOR_WEIGHT
    without: int = 0

    @property
    def rate(self) -> float:
        """The estimated acceptance rate."""
        return self.accepted / self.tried

    def observe(self, drafted: int, accepted: int) -> None:
        """Record that a step verified `drafted` drafts and accepted the first `accepted` of them.

        Drafts after the first wrong one are not counted, because nothing is learnt about them.
        """
        if drafted:
            self.accepted = self.accepted * MEMORY + accepted
            self.tried = self.tried * MEMORY + min(accepted + 1, drafted)

    def next(self, most: int, cost: float = DRAFT_COST) -> int:
        """Return how many drafts the next step should verify, at most `most`.

        Call it once per step.
        cost: that of one more draft, in steps without drafts. 0 never backs off.
        """
        if never_pays(most, cost):
            return 0
        length = best_length(self.rate, most, cost)
        self.without = 0 if length else self.without + 1
        if self.without < PROBE_EVERY:
            return length
        self.without = 0
        return min(1, most)
