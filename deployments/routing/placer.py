"""The placement policy with its memory: what was sent, reported and cached, and by whom.

A replica that has not reported counts as an empty one of the size of the others, so that what is
sent to it counts against it.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import CHUNK_TOKENS, tokens
from deployments.routing.loads import REPORT_AGE_S, ReplicaLoad, SentLedger, Work
from deployments.routing.others import HashRing, PrefixReuse, TrafficShare, elsewhere
from deployments.routing.placement import (
    MAX_COMPARED,
    Costs,
    Guess,
    R,
    blocks_needed,
    choose,
    lacks,
    shortlist,
)
from deployments.routing.prefix_index import PrefixIndex

MAX_SESSIONS = 2**16

MAX_HELD = 2**19
"""About how many chunks of all replicas are remembered, at some 500 bytes each."""

HELD_BY_ALL = 4.0
"""Chunks of which a replica expects more uses than this are not looked for on one replica."""
ASKED_LATELY = math.exp(-1)
"""Of a chunk's count: asked for once, within the time for which requests count."""

REASONS = ("only", "session", "prefix", "load")
"""Why a replica has a request: there was no other one, the session was there before, it held the
beginning of a prompt, or it had the least load. The first that was true when it was chosen counts.
"""


class Placer:
    """`choose`, and all that it has to remember.

    Called from one thread. `now` is in seconds, always by the same clock.
    """

    def __init__(self, costs: Costs | None = None, seed: int | None = None) -> None:
        self._costs = costs or Costs()
        self._rng = random.Random(seed)
        self._index = PrefixIndex()
        self._ledger = SentLedger()
        self._share = TrafficShare()
        self._reuse = PrefixReuse()
        self._replicas: set[Hashable] | None = None  # None: nobody has told
        self._ring: HashRing[Any] = HashRing(())
        self._stats: dict[Hashable, Mapping[str, Any]] = {}
        self._reported: dict[Hashable, tuple[ReplicaLoad, float]] = {}  # load, and when it was true
        self._assumed = ReplicaLoad()  # of a replica that has not reported
        self._ongoing: dict[tuple[Hashable, str], GroupRequest] = {}
        # session -> replica, least recently used first
        self._homes: OrderedDict[str, Hashable] = OrderedDict()

    def rank(
        self, name: str, request: GroupRequest, replicas: Collection[R], now: float
    ) -> list[R]:
        """`replicas`, the best first, for the request of this name.

        From now on, the request counts as load of the first one.
        """
        self._ledger.unplan(name)
        ranked = self._ranked(request, list(replicas), now)
        if ranked:
            work = self._work(request, ranked[0], now)
            reason = self._reason(request, ranked[0])  # later it may hold what others sent
            self._ledger.planned(ranked[0], name, replace(work, reason=reason))
        return ranked

    def _ranked(self, request: GroupRequest, replicas: list[R], now: float) -> list[R]:
        home: Any = self._homes.get(request.session) if request.session else None
        guess = self._guess(request, now)
        sharing = len(replicas) * self._share.value

        def best_first(compared: list[R]) -> list[R]:
            self._rng.shuffle(compared)  # else all routers would choose the same one of equals
            loads = self.loads(compared, now)
            return choose(request, loads, self._index, now, home, self._costs, sharing, guess)

        if len(replicas) <= MAX_COMPARED:
            return best_first(replicas)
        wanted = [home, guess.replica if guess else None]
        compared = best_first(shortlist(request, replicas, self._index, wanted, self._rng))
        if not self.has_room(request, compared[0], now):
            free = [r for r in replicas if self._reported_room(request, r)]
            if free:
                more = self._rng.sample(free, min(len(free), MAX_COMPARED))
                compared = best_first(list({*compared, *more}))
        others = set(compared)
        return [*compared, *(replica for replica in replicas if replica not in others)]

    def _reported_room(self, request: GroupRequest, replica: Hashable) -> bool:
        """Whether the replica's last report alone says that it has room: a quick look."""
        load, _ = self._last_report(replica)
        return not any(lacks(request, load, request.blocks(load.block_size)))

    def _guess(self, request: GroupRequest, now: float) -> Guess[Any] | None:
        """Where other routers would send the leader's prompt; None if there are none of them."""
        chain, share = request.prefixes[0].chain, self._share.value
        if share == 1.0 or not chain:
            return None
        sharing = share * max(1, len(self._replicas or ()))
        uses = [self._index.expected_uses(chunk, now, sharing) for chunk in chain]
        rare = (chunk for chunk, n in zip(chain, uses, strict=True) if n < HELD_BY_ALL)
        replica = self._ring.at(next(rare, chain[-1]))
        if replica is None:
            return None
        worth = (
            self._sent_elsewhere(chain[i], now) * (tokens(i + 1) - tokens(i)) / max(1.0, uses[i])
            for i in range(self._index.matched(replica, chain), len(chain))
        )
        return Guess(replica, sum(worth))

    def _sent_elsewhere(self, chunk: bytes, now: float) -> float:
        """The probability that another router has sent the chunk."""
        asked, share = self._index.asked(chunk, now), self._share.value
        return elsewhere(asked, share) if asked else self._reuse.elsewhere(share)

    def has_room(self, request: GroupRequest, replica: Hashable, now: float) -> bool:
        """Whether the replica has blocks and slots for all streams of the request now."""
        load = self.loads([replica], now)[replica]
        return not any(lacks(request, load, blocks_needed(request, replica, load, self._index)))

    def sent(self, name: str, request: GroupRequest, replica: Hashable, now: float) -> str | None:
        """Note that the replica has taken the request, and return why it has it, one of REASONS.

        That is the reason of the choice, if the replica was its first and takes the request within
        PLANNED_S; else it is what is true now. None if the replica is gone already.
        """
        if self._replicas is not None and replica not in self._replicas:
            self._ledger.unplan(name)
            return None
        reason = self._ledger.reason(replica, name) or self._reason(request, replica)
        self._ledger.sent(replica, name, self._work(request, replica, now))
        self._share.sent(replica)
        if chain := request.prefixes[0].chain:
            again = sum(self._index.asked(chunk, now) > ASKED_LATELY for chunk in chain)
            self._reuse.seen(again / len(chain))
        self._ongoing[replica, name] = request
        for prefix in request.prefixes:
            own = prefix.num_tokens - tokens(len(prefix.chain)) + request.output_tokens // 2
            self._index.add(
                replica, prefix.chain, now, math.ceil(request.copies * own / CHUNK_TOKENS)
            )
            self._index.hold(replica, prefix.chain)
        if request.session:
            self._homes[request.session] = replica
            self._homes.move_to_end(request.session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return reason

    def _reason(self, request: GroupRequest, replica: Hashable) -> str:
        if len(self._replicas or ()) == 1:
            return "only"
        if request.session and self._homes.get(request.session) == replica:
            return "session"
        held = any(self._index.matched(replica, prefix.chain) for prefix in request.prefixes)
        return "prefix" if held else "load"

    def answered(self, name: str, replica: Hashable, now: float) -> None:
        self._ledger.answered(replica, name, now)
        if request := self._ongoing.pop((replica, name), None):
            for prefix in request.prefixes:
                self._index.release(replica, prefix.chain)

    def report(
        self, replica: Hashable, stats: Mapping[str, Any], now: float, age_s: float = REPORT_AGE_S
    ) -> None:
        """Note what the replica reported of itself age_s ago.

        An unchanged report is ignored: Serve passes it again whenever another replica reports.
        """
        if not stats or stats == self._stats.get(replica):
            return
        load = ReplicaLoad.of(stats)
        self._stats[replica], self._reported[replica] = dict(stats), (load, now - age_s)
        self._ledger.reported(replica, now - age_s)
        self._share.reported(replica, load.calls)
        if load.total_blocks:
            # What other routers send takes their share of the cache.
            chunks = self._share.value * load.total_blocks * load.block_size / CHUNK_TOKENS
            most = MAX_HELD // len(self._reported)
            self._index.resize(replica, min(round(chunks), most))
        if load.total_blocks > self._assumed.total_blocks:
            self._assumed = ReplicaLoad(
                free_blocks=load.total_blocks,
                total_blocks=load.total_blocks,
                block_size=load.block_size,
                max_num_seqs=load.max_num_seqs,
            )

    def least_loaded(self, replicas: Collection[R], now: float) -> list[R]:
        """`replicas`, fewest streams first, for a call that computes nothing."""
        loads = self.loads(replicas, now)
        return sorted(replicas, key=lambda replica: loads[replica].streams)

    def loads(self, replicas: Collection[R], now: float) -> dict[R, ReplicaLoad]:
        times = 1 / self._share.value
        return {r: self._ledger.load(r, self._last_report(r)[0], now, times) for r in replicas}

    def reports(self, replicas: Iterable[Hashable]) -> list[ReplicaLoad]:
        """Their last reports, without what was sent since. All is 0 for one that has none."""
        nothing = ReplicaLoad(), -math.inf
        return [self._reported.get(replica, nothing)[0] for replica in replicas]

    def reported_at(self, replicas: Collection[R]) -> float:
        """When the oldest of their reports was true; -inf if a replica has none."""
        return min((self._last_report(replica)[1] for replica in replicas), default=-math.inf)

    def forget(self, *replicas: Hashable) -> None:
        """Forget replicas that are gone, with their caches and their sessions."""
        for replica in replicas:
            for memory in (self._index, self._ledger, self._share):
                memory.forget(replica)
            self._stats.pop(replica, None)
            self._reported.pop(replica, None)
        gone = set(replicas)
        self._ongoing = {key: value for key, value in self._ongoing.items() if key[0] not in gone}
        self._homes = OrderedDict(
            (session, home) for session, home in self._homes.items() if home not in gone
        )

    def keep_only(self, replicas: Collection[Hashable]) -> None:
        if self._replicas == set(replicas):
            return
        if gone := (self._replicas or set()) - set(replicas):
            self.forget(*gone)
        self._replicas = set(replicas)
        self._ring = HashRing(replicas)

    def check_integrity(self) -> None:
        self._index.check_integrity()
        assert len(self._homes) <= MAX_SESSIONS

    def _work(self, request: GroupRequest, replica: Hashable, now: float) -> Work:
        load, _ = self._last_report(replica)
        held = sum(tokens(self._index.matched(replica, p.chain)) for p in request.prefixes)
        blocks = blocks_needed(request, replica, load, self._index)
        return Work(request.tokens - held, blocks, request.streams, now)

    def _last_report(self, replica: Hashable) -> tuple[ReplicaLoad, float]:
        return self._reported.get(replica, (self._assumed, -math.inf))
