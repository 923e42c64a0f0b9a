"""What the other routers of a deployment do, as far as one router can tell.

Each ingress has a router of its own, and they do not talk to each other. A report is half a second
old or more. So if each router believes that it is alone, they all choose the replica that was idle
in the last report, and each computes a prefix on another replica. What helps against both:

- TrafficShare: which part of all calls this router sends. The others probably chose as it did, so
  what it sent since a report counts 1 / share times.
- HashRing: a replica for each prefix, which all routers compute alike (consistent hashing, Karger
  et al. 1997). So they prefer the same replica for a prefix without talking to each other.
- `elsewhere` and PrefixReuse: how probable it is that another router has sent a prefix.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Hashable
from hashlib import blake2b
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)

REMEMBERED = 1000
"""Calls after which the older half of what was counted counts half."""
LEAST_COUNTED = 20
"""Calls before a share is estimated. Until then, a router believes that it is alone."""
LEAST_SHARE = 1 / 64


class TrafficShare:
    """Which part of a deployment's calls this router sends, between LEAST_SHARE and 1."""

    def __init__(self) -> None:
        self._sent: Counter[Hashable] = Counter()  # since each replica's last report
        self._taken: dict[Hashable, int] = {}
        self._own, self._all = 0.0, 0.0

    @property
    def value(self) -> float:
        if self._all < LEAST_COUNTED:
            return 1.0
        return min(1.0, max(LEAST_SHARE, self._own / self._all))

    def sent(self, replica: Hashable) -> None:
        self._sent[replica] += 1

    def reported(self, replica: Hashable, taken: int) -> None:
        """Note how many calls the replica has taken from all routers since its start."""
        before, own = self._taken.get(replica), self._sent.pop(replica, 0)
        self._taken[replica] = taken
        if before is None:
            # Nobody knows how many of them were taken since this router is there. What was sent
            # while the report was on its way is in the next one.
            self._sent[replica] = max(0, own - taken)
            return
        self._own += own
        self._all += max(0, taken - before)
        if self._all > REMEMBERED:
            self._own, self._all = self._own / 2, self._all / 2

    def forget(self, replica: Hashable) -> None:
        self._sent.pop(replica, None)
        self._taken.pop(replica, None)


class PrefixReuse:
    """How often the beginning of a prompt was seen before: a mean over about the last 100."""

    def __init__(self) -> None:
        self._mean = 0.0

    def seen(self, part: float) -> None:
        """Note that this part of a prompt, from 0 to 1, had been sent before by this router."""
        self._mean += (part - self._mean) / 100

    def elsewhere(self, share: float) -> float:
        """The probability that another router has sent what this one has not.

        share: which part of all calls this router sends. If prefixes come as a Poisson process of
        rate r, this router has seen one with probability 1 - exp(-r * share), and the others with
        1 - exp(-r * (1 - share)).
        """
        unseen: float = (1.0 - min(self._mean, 0.99)) ** ((1.0 - share) / share)
        return 1.0 - unseen


def elsewhere(asked: float, share: float) -> float:
    """The probability that other routers have sent what this one was asked for so often."""
    return 1.0 - math.exp(-asked * (1.0 - share) / share)


class HashRing(Generic[R]):
    """One replica for each key, the same in every process.

    If replicas come or go, few keys move. Replicas are told apart by their `str`.
    """

    POINTS = 16
    """For each replica: with more of them, replicas get more equal shares of the keys."""

    def __init__(self, replicas: Collection[R]) -> None:
        points = {
            _hash(f"{replica}:{i}".encode()): replica
            for replica in replicas
            for i in range(self.POINTS)
        }
        self._hashes = sorted(points)
        self._replicas = [points[point] for point in self._hashes]

    def at(self, key: bytes) -> R | None:
        """The replica of this key. None if there are no replicas."""
        if not self._hashes:
            return None
        return self._replicas[bisect(self._hashes, _hash(key)) % len(self._hashes)]


def _hash(value: bytes) -> bytes:
    return blake2b(value, digest_size=8).digest()
