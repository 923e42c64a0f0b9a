"""Which replica computes a group: the placement policy, without Ray.

All streams of a group go to one engine, that of the replica with the least cost:

    cost = prefill tokens waiting there
         + the group's own tokens
         - sum over its chunks held there of CHUNK_TOKENS / max(1, expected uses)
         + stream_tokens * streams there

The unit is one token of prefill. The division by the expected uses is for a negative prompt that
all requests share. Without the division, such a prompt would pull all traffic onto the replica that
saw it first. Computing such a chunk once more on another replica is paid once and used many times,
so each use bears 1 / uses of it. A chunk that would be evicted there before its next use counts in
full.

Two rules come before the cost: a replica without KV blocks for all streams comes after those that
have them, and so does a replica without slots for all streams. A session stays where it was unless
one of these rules or the load speaks against it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from deployments.requests.group import GroupRequest
from deployments.requests.prefixes import CHUNK_TOKENS
from deployments.routing.loads import REPORT_AGE_S, ReplicaLoad, SentLedger, Work
from deployments.routing.prefixes import PrefixIndex

R = TypeVar("R", bound=Hashable)
"""A replica, identified by whatever the caller uses."""

MAX_SESSIONS = 2**16

TIE = 1 / 16
"""Costs that differ by less than this share of the group's own tokens count as equal.

Then the number of streams decides, and then which replica was sent a request least recently.
"""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Weights of the policy.

    stream_tokens: tokens of prefill that one stream on a replica is worth, because it slows every
    step.
    session_ratio, session_slack_tokens: a session leaves a replica whose load is more than
    session_ratio times the least load plus session_slack_tokens.
    """

    stream_tokens: float = 16.0
    session_ratio: float = 2.0
    session_slack_tokens: float = 1024.0


# --- the choice -----------------------------------------------------------------------------------


def choose(
    request: GroupRequest,
    candidates: Mapping[R, ReplicaLoad],
    index: PrefixIndex,
    now: float,
    home: R | None = None,
    costs: Costs | None = None,
) -> list[R]:
    """All candidates, the best first.

    home: where the request's session was before.
    """
    costs = costs or Costs()
    saved = savings(request, candidates, index, now)
    cost = {
        r: load_tokens(load, costs) + request.tokens - saved[r] for r, load in candidates.items()
    }
    missing = {
        r: lacks(request, load, blocks_needed(request, r, load, index))
        for r, load in candidates.items()
    }
    least = min(missing.values(), default=(False, False))
    equal = (
        min((cost[r] for r in candidates if missing[r] == least), default=0.0)
        + TIE * request.tokens
    )

    def rank(replica: R) -> tuple[Any, ...]:
        load = candidates[replica]
        return missing[replica], max(cost[replica], equal), load.streams, load.last_sent

    ranked = sorted(candidates, key=rank)
    if (
        home is None
        or missing.get(home) != least
        or overloaded(candidates[home], candidates, costs)
    ):
        return ranked
    return [home, *(replica for replica in ranked if replica != home)]


def blocks_needed(
    request: GroupRequest, replica: Hashable, load: ReplicaLoad, index: PrefixIndex
) -> int:
    """KV blocks that the request takes there.

    Chunks in use, such as those of a shared negative prompt, take none.
    """
    shared = sum(index.in_use(replica, prefix.chain) for prefix in request.prefixes)
    return request.blocks(load.block_size) - shared * CHUNK_TOKENS // load.block_size


def lacks(request: GroupRequest, load: ReplicaLoad, num_blocks: int) -> tuple[bool, bool]:
    """Whether the replica lacks (KV blocks, slots) for all streams of the request.

    An unknown value does not count as lacking.
    """
    streams = load.streams + request.streams
    return (
        load.total_blocks > 0 and load.headroom_blocks < num_blocks,
        0 < load.max_num_seqs < streams,
    )


def load_tokens(load: ReplicaLoad, costs: Costs) -> float:
    """The load that a request finds there, apart from its own tokens, in tokens of prefill."""
    return load.waiting_tokens + costs.stream_tokens * load.streams


def savings(
    request: GroupRequest, candidates: Collection[R], index: PrefixIndex, now: float
) -> dict[R, float]:
    """What the chunks that each candidate holds are worth, in tokens of prefill."""
    saved = dict.fromkeys(candidates, 0.0)
    for prefix in request.prefixes:
        held = {r: index.matched(r, prefix.chain) for r in candidates}
        longest = prefix.chain[: max(held.values(), default=0)]
        worth = (
            CHUNK_TOKENS / max(1.0, index.expected_uses(chunk, now, len(candidates)))
            for chunk in longest
        )
        total = list(accumulate(worth, initial=0.0))  # of the first 0, 1, 2, ... chunks
        for replica, num_chunks in held.items():
            saved[replica] += total[num_chunks]
    return saved


def overloaded(home: ReplicaLoad, candidates: Mapping[R, ReplicaLoad], costs: Costs) -> bool:
    """Whether a session should leave `home`, although its prefix is cached there."""
    least = min(load_tokens(load, costs) for load in candidates.values())
    return load_tokens(home, costs) > costs.session_ratio * least + costs.session_slack_tokens


# --- what is remembered between choices -----------------------------------------------------------


class Placer:
    """`choose`, and all that it has to remember.

    Called from one thread. `now` is in seconds, always by the same clock.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = costs or Costs()
        self._index = PrefixIndex()
        self._ledger = SentLedger()
        self._replicas: set[Hashable] = set()
        self._stats: dict[Hashable, Mapping[str, Any]] = {}
        self._reported: dict[Hashable, tuple[ReplicaLoad, float]] = {}  # load, and when it was true
        self._ongoing: dict[tuple[Hashable, str], GroupRequest] = {}
        # session -> replica, least recently used first
        self._homes: OrderedDict[str, Hashable] = OrderedDict()

    def rank(
        self, name: str, request: GroupRequest, replicas: Collection[R], now: float
    ) -> list[R]:
        """`replicas`, the best first, for the request of this name.

        From now on, the request counts as load of the first replica.
        """
        self._ledger.unplan(name)
        home: Any = self._homes.get(request.session) if request.session else None
        ranked = choose(request, self.loads(replicas, now), self._index, now, home, self._costs)
        if ranked:
            self._ledger.planned(ranked[0], name, self._work(request, ranked[0], now))
        return ranked

    def sent(self, name: str, request: GroupRequest, replica: Hashable, now: float) -> None:
        """Note that the replica has taken the request."""
        self._ledger.sent(replica, name, self._work(request, replica, now))
        self._ongoing[replica, name] = request
        for prefix in request.prefixes:
            own = prefix.num_tokens - CHUNK_TOKENS * len(prefix.chain) + request.output_tokens // 2
            self._index.add(
                replica, prefix.chain, now, math.ceil(request.copies * own / CHUNK_TOKENS)
            )
            self._index.hold(replica, prefix.chain)
        if request.session:
            self._homes[request.session] = replica
            self._homes.move_to_end(request.session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)

    def answered(self, name: str, replica: Hashable, now: float) -> None:
        """Note that the request is done, or that the replica has refused it.

        The request may be one that was never noted.
        """
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
        if load.total_blocks:
            self._index.resize(replica, load.total_blocks * load.block_size // CHUNK_TOKENS)

    def least_loaded(self, replicas: Collection[R], now: float) -> list[R]:
        """`replicas`, fewest streams first, for a call that computes nothing."""
        loads = self.loads(replicas, now)
        return sorted(replicas, key=lambda replica: loads[replica].streams)

    def loads(self, replicas: Collection[R], now: float) -> dict[R, ReplicaLoad]:
        return {r: self._ledger.load(r, self._last_report(r)[0], now) for r in replicas}

    def reported_at(self, replicas: Collection[R]) -> float:
        """When the oldest of their reports was true; -inf if a replica has none."""
        return min((self._last_report(replica)[1] for replica in replicas), default=-math.inf)

    def forget(self, replica: Hashable) -> None:
        """Forget a replica that is gone, with its cache and its sessions."""
        self._index.forget(replica)
        self._ledger.forget(replica)
        self._stats.pop(replica, None)
        self._reported.pop(replica, None)
        self._ongoing = {
            key: request for key, request in self._ongoing.items() if key[0] != replica
        }
        self._homes = OrderedDict(
            (session, home) for session, home in self._homes.items() if home != replica
        )

    def keep_only(self, replicas: Collection[Hashable]) -> None:
        """Forget all other replicas."""
        for replica in self._replicas - set(replicas):
            self.forget(replica)
        self._replicas = set(replicas)

    def check_integrity(self) -> None:
        self._index.check_integrity()
        assert len(self._homes) <= MAX_SESSIONS

    def _work(self, request: GroupRequest, replica: Hashable, now: float) -> Work:
        load, _ = self._last_report(replica)
        held = sum(self._index.matched(replica, prefix.chain) for prefix in request.prefixes)
        blocks = blocks_needed(request, replica, load, self._index)
        return Work(request.tokens - CHUNK_TOKENS * held, blocks, request.streams, now)

    def _last_report(self, replica: Hashable) -> tuple[ReplicaLoad, float]:
        return self._reported.get(replica, (ReplicaLoad(), -math.inf))
