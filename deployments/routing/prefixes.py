"""What the two streams of a request begin with, and which replica is believed to hold it: text in,
chunk hashes out.

The ingress has no tokenizer, so prefixes are compared as text: chunks of 128 bytes, about 32
tokens, which is two KV blocks. Each chunk's hash includes everything before it, as vLLM's block
hashes do. The hash is BLAKE2b, not Python's `hash`: it is the same in every process and in every
run, so decisions can be replayed, and clients cannot make chunks collide.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import TypeAlias

Replica: TypeAlias = Hashable


# --- which replica holds what ---------------------------------------------------------------------


class Popularity:
    """How often each chunk was asked for lately: counts that decay with exp(-age / window_s).

    The least recently asked are forgotten beyond `capacity` chunks. `now`: seconds, any clock that
    does not go back.
    """

    def __init__(self, window_s: float, capacity: int = 2**17) -> None:
        self._window_s, self._capacity = window_s, capacity
        self._counts: OrderedDict[bytes, tuple[float, float]] = (
            OrderedDict()
        )  # chunk -> count, and when

    def asked(self, chain: Sequence[bytes], now: float) -> None:
        for chunk in chain:
            self._counts[chunk] = self.count(chunk, now) + 1.0, now
            self._counts.move_to_end(chunk)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, chunk: bytes, now: float) -> float:
        """Requests for `chunk` in the last window_s, older ones counting less."""
        count, at = self._counts.get(chunk, (0.0, now))
        return count * math.exp((at - now) / self._window_s)


class PrefixIndex:
    """The chunks that each replica is believed to hold: an LRU for each, as vLLM keeps its cached
    blocks.

    A chain is touched from its end to its root, so parents are always more recent than their
    children, and what is evicted first is a leaf. Called from one thread; `now` as for Popularity.
    """

    def __init__(self, window_s: float = 120.0, default_capacity: int = 4096) -> None:
        """window_s: how far back requests count; default_capacity: in chunks, of replicas whose KV
        is not known."""
        self.window_s = window_s
        self.lifetime_s = window_s
        """How long a chunk that nobody asks for stays, at most window_s: learnt from what is
        evicted."""
        self._default_capacity = default_capacity
        self._capacity: dict[Replica, int] = {}
        self._held: dict[
            Replica, OrderedDict[bytes, tuple[bytes, float]]
        ] = {}  # chunk -> parent, last used
        self._users: defaultdict[Replica, Counter[bytes]] = defaultdict(
            Counter
        )  # chunk -> streams at work with it
        self._popularity = Popularity(window_s)
        self._serial = count()

    def resize(self, replica: Replica, num_chunks: int) -> None:
        """Set what a replica can hold; what is too much goes at the next `add`."""
        self._capacity[replica] = num_chunks

    def matched(self, replica: Replica, chain: Sequence[bytes]) -> int:
        """How many chunks from the start of `chain` the replica holds."""
        held = self._held.get(replica, OrderedDict())
        return next((i for i, chunk in enumerate(chain) if chunk not in held), len(chain))

    def add(
        self, replica: Replica, chain: Sequence[bytes], now: float, own_chunks: int = 0
    ) -> None:
        """The replica computes `chain`, or has it and uses it again. own_chunks: how much KV the
        stream takes besides, for its output and for what fills no chunk: cached too, until evicted,
        but found by nobody."""
        held = self._held.setdefault(replica, OrderedDict())
        capacity = self._capacity.get(replica, self._default_capacity)
        for _ in range(min(own_chunks, capacity - len(chain))):
            held[b"own %d" % next(self._serial)] = chain[-1] if chain else b"", now
        for i in reversed(range(min(len(chain), capacity))):
            held[chain[i]] = chain[i - 1] if i else b"", now
            held.move_to_end(chain[i])
        while len(held) > capacity:
            _, (_, last_used) = held.popitem(last=False)
            self._learn_lifetime(now - last_used)
        self._popularity.asked(chain, now)

    def hold(self, replica: Replica, chain: Sequence[bytes]) -> None:
        """A stream there is at work with `chain`, until as many calls of `release`."""
        self._users[replica].update(chain)

    def release(self, replica: Replica, chain: Sequence[bytes]) -> None:
        users = self._users[replica]
        for chunk in chain:
            users[chunk] -= 1
            if users[chunk] <= 0:
                del users[chunk]

    def in_use(self, replica: Replica, chain: Sequence[bytes]) -> int:
        """How many chunks from the start of `chain` streams are at work with: one more takes no KV
        for them."""
        users = self._users.get(replica, Counter())
        return next((i for i, chunk in enumerate(chain) if chunk not in users), len(chain))

    def _learn_lifetime(self, idle_s: float) -> None:
        """A moving average over the last hundred evictions or so."""
        self.lifetime_s += (min(idle_s, self.window_s) - self.lifetime_s) / 100

    def expected_uses(self, chunk: bytes, now: float, num_replicas: int) -> float:
        """How often one replica would use `chunk` before evicting it, if all replicas shared its
        requests evenly."""
        rate = self._popularity.count(chunk, now) / self.window_s
        return rate * self.lifetime_s / num_replicas

    def forget(self, replica: Replica) -> None:
        """The replica is gone, and its cache with it."""
        for table in (self._held, self._users, self._capacity):
            table.pop(replica, None)

    def check_integrity(self) -> None:
        """Parents are held, and more recent than their children."""
        for held in self._held.values():
            place = {chunk: i for i, chunk in enumerate(held)}
            for chunk, (parent, last_used) in held.items():
                if parent:
                    assert place[parent] > place[chunk]
                    assert held[parent][1] >= last_used
        assert all(num > 0 for users in self._users.values() for num in users.values())
