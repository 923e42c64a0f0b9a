"""Lockstep: the policy that decides which streams run, wait or are preempted in the next step.

A group may sample only in a *joint step*: one in which all its streams compute the logits of the
same next token. `plan(snapshot, needs)` is the whole decision. It is a pure function: it uses
neither vLLM nor a clock, and mutates nothing. The scheduler adapter takes the snapshot and carries
out the plan. If only some streams of a group sample after all, the adapter takes their samples
back.

The policy:
1. The streams of a group are scheduled next to each other.
2. A group samples in a step only if all its streams can finish their prompts (or decode) within the
   step's budget. Otherwise each stream computes at most up to the token before its last one and
   waits there, so that no logits are computed that would have to be thrown away. An image, audio
   or video that the encoder has no room for in the step holds the group in the same way. With a
   `joint_limit`, all streams must be that far before the group samples. A stream with a suffix
   samples if the whole suffix fits behind its last token.
3. The free KV blocks must suffice for everything that is planned. If they do not, whole units are
   preempted: the last one first or, under the priority policy, the one with the greatest rank
   first. One unit always remains. It can finish, so there is no deadlock.
4. At most one group is half admitted (some of its streams run, and some wait). Other groups in that
   state are preempted. The missing streams of the remaining one go to the head of the queue.
5. A waiting group may sample in the step that admits it if all its streams fit into the budget, the
   slots, the KV blocks and the encoder's room that are left, and if there is no `joint_limit`.

A *unit* is planned as a whole: a plain request, a group, or the admitted part of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cfg_core.policy.media_budget import NO_ROOM, MediaBudget, MediaItem, Room


@dataclass(frozen=True, slots=True)
class StreamState:
    """One running stream.

    remaining: tokens that it must compute before its next token can be sampled. It is 1 for a
        stream that decodes without drafts, and 0 or less if there is nothing to compute now.
    media: the images, audio and video among them that the encoder has no place for yet.
    end: how many of the last of these tokens only a joint step computes: its last one and, if it
        has a suffix, those of the suffix.
    drafts: how many of the last of these tokens are drafts.
    """

    id: str
    remaining: int
    follower: bool = False
    media: tuple[MediaItem, ...] = ()
    end: int = 1
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A plain request, a group, or the admitted part of a group.

    guided: whether it is a group, or a part of one.
    missing: the streams of the group that still wait for admission.
    rank: under the priority policy, the unit with the greatest rank is preempted first. FCFS does
        not use it.
    """

    streams: tuple[StreamState, ...]
    guided: bool = False
    missing: tuple[str, ...] = ()
    rank: tuple[float, ...] = ()

    @property
    def half_admitted(self) -> bool:
        return bool(self.missing)


@dataclass(frozen=True, slots=True)
class WaitingUnit:
    """A unit at the front of the waiting queue.

    ids: its streams, in queue order.
    lengths: total number of tokens of each stream.
    guided: whether it is a whole group.
    media: the images, audio and video of each stream.
    cached: how many tokens of each stream are believed to be in the prefix cache. Empty: none.
    """

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    guided: bool = False
    media: tuple[tuple[MediaItem, ...], ...] = ()
    cached: tuple[int, ...] = ()

    @property
    def to_compute(self) -> tuple[int, ...]:
        """Tokens of each stream that are not believed to be cached."""
        cached = self.cached or (0,) * len(self.lengths)
        return tuple(n - hits for n, hits in zip(self.lengths, cached, strict=True))


@dataclass(frozen=True, slots=True)
class Headroom:
    """Free KV blocks: the total, and the number that each role may still take.

    leaders: for leaders and plain requests.
    followers: for followers. Both numbers equal `total` if the split of the pool is elastic.
    """

    total: int
    leaders: int
    followers: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine as the policy sees it, just before a step.

    token_budget: tokens that the step may compute.
    chunk_limit: tokens that one stream may compute in the step. 0 means no limit.
    free_slots: number of further streams that may be admitted.
    drafting_slots: tokens of the budget that each scheduled stream takes besides its own. Under
        speculation a drafter needs them for its own rows.
    by_rank: whether units are preempted by rank (the priority policy).
    media_room: the room for images, audio and video.
    joint_limit: most tokens that a stream may compute in the step in which its group samples,
        besides its drafts. 0 means no limit. It is set if a solo sample is costly, and if vLLM may
        compute fewer tokens of a prompt than were granted.
    """

    running: tuple[Unit, ...]
    waiting: tuple[WaitingUnit, ...]
    token_budget: int
    headroom: Headroom
    chunk_limit: int = 0
    free_slots: int = 0
    drafting_slots: int = 0
    by_rank: bool = False
    media_room: Room = NO_ROOM
    joint_limit: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do in the step.

    order: running streams, in scheduling order.
    sampling: guided streams, running or waiting, that may compute their last token and sample.
    preempt: units to preempt as a whole, in this order.
    promote: waiting streams to move to the head of the queue.
    """

    order: tuple[str, ...]
    sampling: frozenset[str]
    preempt: tuple[Unit, ...] = ()
    promote: tuple[str, ...] = ()


class BlockNeeds(Protocol):
    """Counts the new KV blocks that a stream needs to compute further tokens."""

    def at_most(self, num_tokens: int) -> int:
        """Return an upper bound that is cheap to compute and holds for any stream."""

    def exactly(self, stream: str, num_tokens: int) -> int:
        """Return the exact number for this stream."""


@dataclass(slots=True)
class _Allotment:
    """Tokens granted to each stream, and the streams of the groups that may sample.

    budget: tokens of the step that are not granted yet.
    drafting_slots: see `Snapshot`.
    media_budget: the room for images, audio and video that is not taken yet.
    """

    grants: list[tuple[StreamState, int]]
    sampling: set[str]
    budget: int
    drafting_slots: int
    media_budget: MediaBudget


def plan(snapshot: Snapshot, needs: BlockNeeds) -> StepPlan:
    """Decide the next step.

    The loop terminates, because each round preempts a unit, until only one is left.
    """
    evicted = [u for u in snapshot.running if u.half_admitted][1:]  # rule 4
    units = [u for u in snapshot.running if u not in evicted] if evicted else list(snapshot.running)
    allotment = _allot(units, snapshot)
    while len(units) > 1 and not _fits(allotment.grants, snapshot.headroom, needs):
        evicted.append(units.pop(_victim(units, snapshot.by_rank)))
        allotment = _allot(units, snapshot)
    sampling = allotment.sampling
    if not evicted and not snapshot.joint_limit:
        sampling |= _admissible(snapshot, allotment, needs)
    return StepPlan(
        order=tuple(s.id for u in units for s in u.streams),
        sampling=frozenset(sampling),
        preempt=tuple(evicted),
        promote=next((u.missing for u in units if u.half_admitted), ()),
    )


def all_may_decode(num_tokens: int, num_blocks: int, token_budget: int, headroom: Headroom) -> bool:
    """Return whether it is certain that `plan` would let all decoding streams go on.

    num_tokens, num_blocks: upper bounds of what these streams need together.
    """
    return num_tokens <= token_budget and num_blocks <= min(
        headroom.total, headroom.leaders, headroom.followers
    )


def _victim(units: Sequence[Unit], by_rank: bool) -> int:
    """Return the index of the unit to preempt next.

    That is the last one or, under the priority policy, the one with the greatest rank.
    """
    if not by_rank:
        return len(units) - 1
    return max(range(len(units)), key=lambda i: (units[i].rank, i))


def _allot(units: Sequence[Unit], snapshot: Snapshot) -> _Allotment:
    """Distribute the token budget over the units in order (rules 1 and 2)."""
    media_budget = MediaBudget(snapshot.media_room)
    out = _Allotment([], set(), snapshot.token_budget, snapshot.drafting_slots, media_budget)
    limit = snapshot.chunk_limit or snapshot.token_budget
    for unit in units:
        if unit.guided:
            _allot_guided(unit, limit, snapshot.joint_limit, out)
        else:
            _grant(unit.streams[0], unit.streams[0].remaining, limit, out)
    return out


def _allot_guided(unit: Unit, limit: int, joint_limit: int, out: _Allotment) -> None:
    """Grant a joint step if the whole group is running and fits.

    Otherwise grant each stream everything but its end.
    """
    remaining = [s.remaining for s in unit.streams]
    needed = sum(remaining) + out.drafting_slots * len(remaining)
    joint = (
        not unit.half_admitted
        and all(s.remaining >= s.end for s in unit.streams)
        and max(remaining) <= limit
        and (not joint_limit or all(s.remaining - s.drafts <= joint_limit for s in unit.streams))
        and needed <= out.budget
        and out.media_budget.reaches_all([(s.media, s.remaining) for s in unit.streams])
    )
    for stream in unit.streams:
        _grant(stream, stream.remaining if joint else stream.remaining - stream.end, limit, out)
    if joint:
        out.sampling.update(s.id for s in unit.streams)


def _grant(stream: StreamState, wanted: int, limit: int, out: _Allotment) -> None:
    num_tokens = min(wanted, limit, out.budget - out.drafting_slots)
    if stream.media:
        num_tokens = out.media_budget.reach(stream.media, num_tokens)
    if num_tokens > 0:
        out.grants.append((stream, num_tokens))
        out.budget -= num_tokens + out.drafting_slots


def _fits(grants: Sequence[tuple[StreamState, int]], headroom: Headroom, needs: BlockNeeds) -> bool:
    """Return whether the free blocks suffice for all grants (rule 3).

    Exact numbers are computed only if the cheap upper bound does not fit.
    """
    bound = sum(needs.at_most(n) for _, n in grants)
    if bound <= min(headroom.total, headroom.leaders, headroom.followers):
        return True
    leaders = sum(needs.exactly(s.id, n) for s, n in grants if not s.follower)
    followers = sum(needs.exactly(s.id, n) for s, n in grants if s.follower)
    return (
        leaders + followers <= headroom.total
        and leaders <= headroom.leaders
        and followers <= headroom.followers
    )


def _admissible(snapshot: Snapshot, allotment: _Allotment, needs: BlockNeeds) -> set[str]:
    """Return the waiting streams that may sample in the step that admits them (rule 5).

    Blocks are a conservative estimate: the upper bound, as if none of them were cached. Tokens are
    those that are not believed to be cached. If only a part of a group samples after all, the
    scheduler adapter takes these samples back.
    """
    budget, slots = allotment.budget, snapshot.free_slots
    free = min(snapshot.headroom.total, snapshot.headroom.leaders, snapshot.headroom.followers)
    free -= sum(needs.at_most(n) for _, n in allotment.grants)
    sampling: set[str] = set()
    for unit in snapshot.waiting:
        computed = unit.to_compute
        budget -= sum(computed) + snapshot.drafting_slots * len(computed)
        slots -= len(unit.lengths)
        free -= sum(needs.at_most(n) for n in unit.lengths)
        if budget < 0 or slots < 0 or free < 0 or 0 < snapshot.chunk_limit < max(computed):
            break
        needed = list(zip(unit.media, unit.lengths, strict=False))
        if not allotment.media_budget.reaches_all(needed):
            break
        for media, length in needed:
            allotment.media_budget.reach(media, length)
        if unit.guided:
            sampling.update(unit.ids)
    return sampling
