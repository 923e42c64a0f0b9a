"""How many drafts are worth verifying, from how many were kept: the policy by which speculation
backs off.

With a chance `c` that a draft is kept if those before it were, k drafts give (1 - c^(k+1)) / (1 -
c) tokens a step (Leviathan et al., arXiv 2211.17192, eq. 1), and the step costs 1 + k times what
one more draft costs. Under guidance `c` differs from request to request, with the scale: each group
has its own estimate, and the length that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_COST = 0.2
"""What one more draft costs, drafted and verified, in steps without drafts. With it, a chance below
0.2 means none."""

MEMORY = 0.9
"""What a step's evidence is worth a step later: some ten steps count."""

HOPE = 0.8
HOPE_WEIGHT = 2.0
"""Before anything is known, the chance is taken to be HOPE, as if seen with HOPE_WEIGHT drafts."""

PROBE_EVERY = 32
"""Of steps without drafts, each such one tries a single draft: a text may become easier."""


def tokens_per_step(chance: float, drafts: int) -> float:
    """Expected tokens of a step, the one that needs no draft included."""
    return sum(chance**i for i in range(drafts + 1))


def best_length(chance: float, most: int, cost: float = DRAFT_COST) -> int:
    """The number of drafts, at most `most`, with the most tokens for the cost; the larger of two
    equals."""
    return max(range(most, -1, -1), key=lambda k: tokens_per_step(chance, k) / (1 + cost * k))


def never_pays(most: int, cost: float) -> bool:
    """Whether drafts cost so much that even hoped-for ones are not worth making: no text gets
    any."""
    return best_length(HOPE, most, cost) == 0


@dataclass(slots=True)
class DraftLength:
    """One sequence's estimate, and its next length. cost: of one more draft; 0 never backs off."""

    cost: float = DRAFT_COST
    kept: float = HOPE * HOPE_WEIGHT
    tried: float = HOPE_WEIGHT
    without: int = 0

    @property
    def chance(self) -> float:
        """That a draft is kept, if those before it were."""
        return self.kept / self.tried

    def observe(self, drafted: int, kept: int) -> None:
        """A step verified `drafted` drafts and kept the first `kept`; nothing is learnt of those
        behind a wrong one."""
        if drafted:
            self.kept = self.kept * MEMORY + kept
            self.tried = self.tried * MEMORY + min(kept + 1, drafted)

    def next(self, most: int) -> int:
        """How many drafts the next step should verify, at most `most`. Call it once a step."""
        if never_pays(most, self.cost):
            return 0
        length = best_length(self.chance, most, self.cost)
        self.without = 0 if length else self.without + 1
        if self.without < PROBE_EVERY:
            return length
        self.without = 0
        return min(1, most)
