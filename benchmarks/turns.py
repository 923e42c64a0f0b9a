"""Ways that take turns: a machine's speed changes, and what runs side by side bears it alike."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Turns:
    """took: in each turn, what each way took."""

    took: list[dict[str, float]]

    def values(self, way: str) -> list[float]:
        return [turn[way] for turn in self.took]

    def median(self, way: str) -> float:
        return statistics.median(self.values(way))

    def medians(self) -> dict[str, float]:
        return {way: self.median(way) for way in self.took[0]}

    def ratios(self, of: str, to: str) -> list[float]:
        """The ratio of two ways within each turn."""
        return [turn[of] / turn[to] for turn in self.took]

    def ratio(self, of: str, to: str) -> float:
        return statistics.median(self.ratios(of, to))


def take_turns(ways: Mapping[str, Callable[[], float]], turns: int, warm_up: int = 1) -> Turns:
    """Run all ways in each turn, in changing order.

    warm_up: so many turns come first, and do not count. What each way took is told on stderr.
    """
    took = []
    for turn in range(warm_up + turns):
        order = list(ways)[:: 1 if turn % 2 else -1]
        run = {}
        for way in order:
            run[way] = ways[way]()
            print(f"turn {turn - warm_up + 1} of {turns}, {way}: {run[way]:.3g}", file=sys.stderr)
        took.append({way: run[way] for way in ways})
    return Turns(took[warm_up:])


def spread(values: list[float]) -> str:
    """The smallest and the largest, for a cell of a table."""
    return f"{min(values):.2f} to {max(values):.2f}"
