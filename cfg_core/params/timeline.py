"""Timeline: which output tokens of a request are guided, and with what weights.

A window guides some tokens of the output only (LlamaGen stops guidance after a number of tokens).
Markers guide those between a start and an end token (the tokens of an image in Emu3.5 and Lumina).
A schedule changes the scale along the output (YuE begins with 1.5 and goes on with 1.2).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from cfg_core.params.between import Between


@dataclass(frozen=True, slots=True)
class Timeline:
    """Output tokens are counted from 0.

    changes: (first token, weights of all streams, the leader's first), ascending from token 0.
    start, end: the tokens from `start` to before `end` are guided. None: to the end of the text.
    between: of these, only the tokens between markers; None for all. Which those are depends on the
        text (cfg_core/policy/markers.py), and the methods below do not know it.
    """

    changes: tuple[tuple[int, tuple[float, ...]], ...]
    start: int = 0
    end: int | None = None
    between: Between | None = None

    def guides(self, token: int) -> bool:
        """Whether this output token is guided."""
        return self.start <= token and not self.is_over(token)

    def is_over(self, token: int) -> bool:
        """Whether neither this token nor a later one is guided."""
        return self.end is not None and token >= self.end

    def weights_at(self, token: int) -> tuple[float, ...]:
        """The weights for this output token, if it is guided."""
        place = bisect.bisect_right(self.changes, token, key=lambda change: change[0])
        return self.changes[place - 1][1]

    def next_change(self, token: int) -> int | None:
        """The first output token after this one to which other rules apply; None if none does."""
        bounds = [self.start, *(first for first, _ in self.changes)]
        if self.end is not None:
            bounds = [*(bound for bound in bounds if bound < self.end), self.end]
        return min((bound for bound in bounds if bound > token), default=None)
