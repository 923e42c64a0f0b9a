"""What the admission queue (queue.py) counts: sums of demands, and the rate at which they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deployments.requests.demand import Demand

RATE_WINDOW_S = 30.0
"""Seconds over which the rate of ending requests is measured."""


@dataclass(slots=True)
class Sum:
    """A sum of demands."""

    requests: int = 0
    streams: int = 0
    tokens: int = 0

    def __iadd__(self, demand: Demand) -> Sum:
        return self._add(demand, 1)

    def __isub__(self, demand: Demand) -> Sum:
        return self._add(demand, -1)

    def _add(self, demand: Demand, sign: int) -> Sum:
        self.requests += sign
        self.streams += sign * demand.streams
        self.tokens += sign * demand.tokens
        return self


class DrainRate:
    """Tokens per second of the requests that ended within the last RATE_WINDOW_S."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._start = now, now()
        self._ended: deque[tuple[float, int]] = deque()

    def ended(self, tokens: int) -> None:
        self._ended.append((self._now(), tokens))
        self._forget_old()

    def per_second(self) -> float:
        """The rate; 0 if no request has ended lately."""
        self._forget_old()
        span_s = min(RATE_WINDOW_S, max(1.0, self._now() - self._start))
        return sum(tokens for _, tokens in self._ended) / span_s

    def _forget_old(self) -> None:
        while self._ended and self._ended[0][0] < self._now() - RATE_WINDOW_S:
            self._ended.popleft()
