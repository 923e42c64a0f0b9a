"""Gates: whether a step needs the negative, as far as the last token tells.

With `guidance_min_entropy` a token is guided only where its leader is uncertain. A leader whose
negative costs more than its own row (a suffix) can compute that row alone, in a *probe*: it says
whether the gate is open. Where it is closed, the probe's sample is the token. Where it is open, the
probe was in vain, and the token comes from a joint step.

Uncertain tokens come in runs, and a joint step says for itself whether its gate was open. So a
gate that has opened is not probed until it has closed.

A probe that finds its gate closed saves time for all requests of the step. One that finds it open
costs its own request some steps. `Gates` probes where the former outweighs the latter, by what it
has seen of each text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MEMORY = 0.95
"""Earlier evidence is multiplied by this with each token behind a closed gate, so twenty count."""

PRIOR = 0.1
PRIOR_WEIGHT = 5.0
"""The first estimate of a rate is PRIOR, as if PRIOR_WEIGHT tokens had been observed."""


def pays(rate: float, saved: float, lost: float) -> bool:
    """Return whether a probe can be expected to save more than it costs.

    rate: the probability that it finds its gate open.
    saved: what it saves if it finds its gate closed, for all requests together, in steps.
    lost: what it costs its request if it finds its gate open, in steps.
    """
    return (1 - rate) * saved > rate * lost


@dataclass(slots=True)
class _Gate:
    """The gate of one group, and how often it opens.

    tokens: how many the suffix has.
    opened, seen: weighted counts of the tokens behind a closed gate: those whose gates are open,
        and all.
    """

    tokens: int
    is_closed: bool = False
    opened: float = PRIOR * PRIOR_WEIGHT
    seen: float = PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        """The estimated probability that the gate is open at the token behind a closed one."""
        return self.opened / self.seen

    def saw(self, is_open: bool) -> None:
        if self.is_closed:
            self.opened = self.opened * MEMORY + is_open
            self.seen = self.seen * MEMORY + 1
        self.is_closed = not is_open


class Gates:
    """The gates of one engine's groups that can be probed, each by its leader.

    A group begins with a joint step: its first token then comes without delay, and tells of the
    next.

    lost: see `pays`.
    """

    def __init__(self, lost: float) -> None:
        self._lost = lost
        self._gates: dict[str, _Gate] = {}

    def __contains__(self, leader: object) -> bool:
        return leader in self._gates

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    def add(self, leader: str, tokens: int) -> None:
        """Note a group that begins. tokens: how many its suffix has."""
        self._gates[leader] = _Gate(tokens)

    def remove(self, leader: str) -> None:
        """Forget a group, if it is known."""
        self._gates.pop(leader, None)

    def saw(self, leader: str, is_open: bool) -> None:
        """Note what a step, joint or a probe, said of the gate of a group that is known."""
        self._gates[leader].saw(is_open)

    def tokens(self, leader: str) -> int:
        """How many tokens the suffix of a group has."""
        return self._gates[leader].tokens

    def is_closed(self, leader: str) -> bool:
        """Whether the gate of a group's last token was closed."""
        return self._gates[leader].is_closed

    def to_probe(self, token_cost: float) -> set[str]:
        """The leaders that should run alone in the coming step.

        token_cost: what computing one more token costs all requests together, in steps.
        """
        return {
            leader
            for leader, gate in self._gates.items()
            if gate.is_closed and pays(gate.rate, token_cost * gate.tokens, self._lost)
        }
