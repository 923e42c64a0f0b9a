"""Which replica is believed to hold which chunks of prefixes, and how often each is asked for.

A chunk is the hash of a piece of a prompt and of all that comes before it
(requests/prefix_hashes.py). Its size in units depends on its place in the prompt alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Hashable, Iterator, Sequence
from itertools import count
from typing import TypeAlias

from deployments.requests.prefix_hashes import units, whole_chunks

Replica: TypeAlias = Hashable


# --- which replica holds what ---------------------------------------------------------------------


class Popularity:
    """How often each chunk was asked for lately: counts that decay with exp(-age / window_s).

    Beyond `capacity` chunks, those that were asked for least recently are forgotten. `now` is in
    seconds, by any clock that does not go back.
    """

    def __init__(self, window_s: float, capacity: int = 2**17) -> None:
        self._window_s, self._capacity = window_s, capacity
        # chunk -> count, and when it was true
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def asked(self, chain: Sequence[bytes], now: float) -> None:
        for chunk in chain:
            self._counts[chunk] = self.count(chunk, now) + 1.0, now
            self._counts.move_to_end(chunk)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, chunk: bytes, now: float) -> float:
        """How often `chunk` was asked for in the last window_s; older requests count less."""
        count, at = self._counts.get(chunk, (0.0, now))
        return count * math.exp((at - now) / self._window_s)


class PrefixIndex:
    """The chunks that each replica is believed to hold: an LRU list for each replica.

    vLLM keeps its cached blocks in the same way. A chain is touched from its end to its root, so
    parents are always more recent than their children, and the chunk that is evicted first is a
    leaf. Called from one thread. `now` is as for Popularity.
    """

    def __init__(self, window_s: float = 120.0, default_capacity: int = 4096) -> None:
        """Create an empty index.

        window_s: how far back requests count, in seconds.
        default_capacity: units that a replica can hold if its KV cache size is not known.
        """
        self.window_s = window_s
        self.lifetime_s = window_s
        """Seconds for which a chunk that nobody asks for stays cached, learnt from evictions."""
        self._default_capacity = default_capacity
        self._capacity: dict[Replica, int] = {}
        # replica -> chunk -> parent, last used, units
        self._held: dict[Replica, OrderedDict[bytes, tuple[bytes, float, int]]] = {}
        self._units: Counter[Replica] = Counter()
        # chunk -> replicas that hold it
        self._holders: defaultdict[bytes, set[Replica]] = defaultdict(set)
        # replica -> chunk -> streams that use it
        self._users: defaultdict[Replica, Counter[bytes]] = defaultdict(Counter)
        self._popularity = Popularity(window_s)
        self._serial = count()

    def resize(self, replica: Replica, num_units: int) -> None:
        """Set how many units a replica can hold; the next `add` evicts what is too much."""
        self._capacity[replica] = num_units

    def matched(self, replica: Replica, chain: Sequence[bytes]) -> int:
        """How many chunks from the start of `chain` the replica holds."""
        return _num_first_in(self._held.get(replica, {}), chain)

    def holders(self, chain: Sequence[bytes]) -> Iterator[set[Replica]]:
        """The replicas that hold the first n chunks of `chain`, from n = all down to n = 1.

        A set includes the one before it. Sets without a replica are left out.
        """
        return (self._holders[chunk] for chunk in reversed(chain) if chunk in self._holders)

    def add(self, replica: Replica, chain: Sequence[bytes], now: float, own_units: int = 0) -> None:
        """Note that the replica computes `chain`, or has it and uses it again.

        own_units: how much other KV the stream takes, for its output and for the part of the
        prompt that fills no chunk. It is cached too, but no other request can match it.
        """
        held = self._held.setdefault(replica, OrderedDict())
        capacity = self._capacity.get(replica, self._default_capacity)
        for _ in range(min(own_units, capacity - units(len(chain)))):
            held[b"own %d" % next(self._serial)] = chain[-1] if chain else b"", now, 1
            self._units[replica] += 1
        for i in reversed(range(min(len(chain), whole_chunks(capacity)))):
            if chain[i] not in held:
                self._units[replica] += units(i + 1) - units(i)
            held[chain[i]] = chain[i - 1] if i else b"", now, units(i + 1) - units(i)
            held.move_to_end(chain[i])
            self._holders[chain[i]].add(replica)
        while self._units[replica] > capacity:
            chunk, (_, last_used, size) = held.popitem(last=False)
            self._units[replica] -= size
            self._no_longer_held(replica, chunk)
            self._learn_lifetime(now - last_used)
        self._popularity.asked(chain, now)

    def hold(self, replica: Replica, chain: Sequence[bytes]) -> None:
        """Note that a stream there uses `chain`, until `release` is called as often."""
        self._users[replica].update(chain)

    def release(self, replica: Replica, chain: Sequence[bytes]) -> None:
        users = self._users[replica]
        for chunk in chain:
            users[chunk] -= 1
            if users[chunk] <= 0:
                del users[chunk]

    def in_use(self, replica: Replica, chain: Sequence[bytes]) -> int:
        """How many chunks from the start of `chain` streams use there, for one more to share."""
        return _num_first_in(self._users.get(replica, {}), chain)

    def _no_longer_held(self, replica: Replica, chunk: bytes) -> None:
        if chunk in self._holders:  # it is not if the chunk is a stream's own
            self._holders[chunk].discard(replica)
            if not self._holders[chunk]:
                del self._holders[chunk]

    def _learn_lifetime(self, idle_s: float) -> None:
        """Update a moving average over about the last hundred evictions."""
        self.lifetime_s += (min(idle_s, self.window_s) - self.lifetime_s) / 100

    def expected_uses(self, chunk: bytes, now: float, num_replicas: float) -> float:
        """How often a replica uses `chunk` before evicting it, if so many share its requests."""
        rate = self._popularity.count(chunk, now) / self.window_s
        return rate * self.lifetime_s / num_replicas

    def asked(self, chunk: bytes, now: float) -> float:
        """How often `chunk` was asked for lately: see Popularity."""
        return self._popularity.count(chunk, now)

    def forget(self, replica: Replica) -> None:
        for chunk in self._held.get(replica, ()):
            self._no_longer_held(replica, chunk)
        for table in (self._held, self._users, self._capacity, self._units):
            table.pop(replica, None)

    def check_integrity(self) -> None:
        """For tests: assert that parents are held, and are more recent than their children."""
        for replica, held in self._held.items():
            place = {chunk: i for i, chunk in enumerate(held)}
            assert self._units[replica] == sum(size for _, _, size in held.values())
            for chunk, (parent, last_used, _) in held.items():
                if parent:
                    assert place[parent] > place[chunk]
                    assert held[parent][1] >= last_used
        held_by = {(chunk, r) for chunk, replicas in self._holders.items() for r in replicas}
        held_now = {(chunk, r) for r, held in self._held.items() for chunk in held}
        assert held_by <= held_now
        assert all(chunk.startswith(b"own ") for chunk, _ in held_now - held_by)
        assert all(self._holders.values())
        assert all(num > 0 for users in self._users.values() for num in users.values())


def _num_first_in(known: Container[bytes], chain: Sequence[bytes]) -> int:
    """How many chunks from the start of `chain` are in `known`, which has none without parent."""
    return bisect_left(range(len(chain)), True, key=lambda place: chain[place] not in known)
