"""Which replica computes a group: the placement policy, without Ray.

All streams of a group go to one engine, that of the replica with the least cost:

    cost = prefill tokens waiting there
         + the group's own tokens
         - sum over its chunks held there of tokens in the chunk / max(1, expected uses)
         + stream_tokens * streams there

The unit is one token of prefill. Without the division by the expected uses, a negative prompt that
all requests share would pull all traffic onto the replica that saw it first. Computing such a chunk
once more on another replica is paid once and used many times, so each use bears 1 / uses of it. A
chunk that would be evicted there before its next use counts in full.

Two rules come before the cost: a replica without KV blocks for all streams comes after those that
have them, and so does a replica without slots for all streams. A session stays where it was unless
one of these rules or the load speaks against it.

Among many replicas, only MAX_COMPARED are compared: the session's home, those that hold the
longest beginnings of the prompts, and others at random (as in "the power of two choices",
Mitzenmacher 2001). If the best of them lacks blocks or slots, as many of those that reported room
are compared, too.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import tokens
from deployments.routing.loads import ReplicaLoad
from deployments.routing.prefix_index import PrefixIndex

R = TypeVar("R", bound=Hashable)
"""A replica, identified by whatever the caller uses."""

MAX_COMPARED = 32
"""How many replicas are compared for one request, if one of them has room."""

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


@dataclass(frozen=True)
class Guess(Generic[R]):
    """Where another router may have sent a prompt, and how many more tokens it may save there."""

    replica: R
    tokens: float


def choose(
    request: GroupRequest,
    candidates: Mapping[R, ReplicaLoad],
    index: PrefixIndex,
    now: float,
    home: R | None = None,
    costs: Costs | None = None,
    sharing: float | None = None,
    guess: Guess[R] | None = None,
) -> list[R]:
    """All candidates, the best first.

    home: where the request's session was before.
    sharing: how many replicas share what this router sends. None: the candidates.
    """
    costs = costs or Costs()
    saved = savings(request, candidates, index, now, sharing or len(candidates))
    if guess is not None and guess.replica in saved:
        saved[guess.replica] += guess.tokens
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
    if home is None or missing.get(home) != least:
        return ranked
    if overloaded(candidates[home], candidates, costs):
        return ranked
    return [home, *(replica for replica in ranked if replica != home)]


def blocks_needed(
    request: GroupRequest, replica: Hashable, load: ReplicaLoad, index: PrefixIndex
) -> int:
    """KV blocks that the request takes there. Chunks in use by others take none."""
    shared = sum(tokens(index.in_use(replica, prefix.chain)) for prefix in request.prefixes)
    return request.blocks(load.block_size) - shared // load.block_size


def lacks(request: GroupRequest, load: ReplicaLoad, num_blocks: int) -> tuple[bool, bool]:
    """Whether the replica lacks (KV blocks, slots) for all streams of the request, if known."""
    lacks_blocks = load.total_blocks > 0 and load.headroom_blocks < num_blocks
    return lacks_blocks, 0 < load.max_num_seqs < load.streams + request.streams


def load_tokens(load: ReplicaLoad, costs: Costs) -> float:
    """The load that a request finds there, apart from its own tokens, in tokens of prefill."""
    return load.waiting_tokens + costs.stream_tokens * load.streams


def savings(
    request: GroupRequest,
    candidates: Collection[R],
    index: PrefixIndex,
    now: float,
    sharing: float,
) -> dict[R, float]:
    """What the chunks that each candidate holds are worth, in tokens of prefill."""
    saved = dict.fromkeys(candidates, 0.0)
    for prefix in request.prefixes:
        held = {r: index.matched(r, prefix.chain) for r in candidates}
        longest = prefix.chain[: max(held.values(), default=0)]
        worth = (
            (tokens(i + 1) - tokens(i)) / max(1.0, index.expected_uses(chunk, now, sharing))
            for i, chunk in enumerate(longest)
        )
        total = list(accumulate(worth, initial=0.0))  # of the first 0, 1, 2, ... chunks
        for replica, num_chunks in held.items():
            saved[replica] += total[num_chunks]
    return saved


def shortlist(
    request: GroupRequest,
    replicas: Sequence[R],
    index: PrefixIndex,
    wanted: Iterable[R | None],
    rng: random.Random,
) -> list[R]:
    """MAX_COMPARED of the replicas, which are more.

    wanted: those that must be among them, if they still exist. At most half of the rest are there
    for what they hold, so that the load of the others counts, too.
    """
    known = set(replicas)
    chosen: set[Any] = known.intersection(wanted)
    for prefix in request.prefixes:
        most = len(chosen) + MAX_COMPARED // 2 // len(request.prefixes)
        for holders in index.holders(prefix.chain):
            if len(chosen) >= most:
                break
            new = list((holders & known) - chosen)
            chosen.update(rng.sample(new, min(len(new), most - len(chosen))))
    while len(chosen) < MAX_COMPARED:
        chosen.add(rng.choice(replicas))
    return list(chosen)


def overloaded(home: ReplicaLoad, candidates: Mapping[R, ReplicaLoad], costs: Costs) -> bool:
    """Whether a session should leave `home`, although its prefix is cached there."""
    least = min(load_tokens(load, costs) for load in candidates.values())
    return load_tokens(home, costs) > costs.session_ratio * least + costs.session_slack_tokens
