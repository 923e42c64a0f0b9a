"""Lockstep: the policy that decides which streams run, wait or are preempted in the next step.

A group may sample only in a *joint step*: one in which all its streams compute the logits of the
same next token. `plan(snapshot, needs)` is the whole decision. It is pure: no vLLM, no clock, no
mutation. The scheduler adapter takes the snapshot, carries the plan out, and takes back whatever
went differently.

The policy:
1. The streams of a group are scheduled next to each other.
2. A group samples in a step only if all its streams can finish their prompts (or decode) within the
   step's budget. Otherwise each stream computes at most up to the token before its last one, and
   waits there, so no logits are computed that would have to be thrown away.
3. The KV blocks of everything planned are reserved beforehand. If they do not suffice, whole units
   are preempted from the tail. The unit at the head is never preempted, so it finishes, so there is
   no deadlock.
4. At most one group is half admitted (some streams running, some waiting). Others in that state are
   preempted; the missing stream of the remaining one goes to the head of the queue.
5. A waiting group may sample in the step that admits it if all its streams fit what is left.

A *unit* is what is planned together: a plain request, a group, or the admitted part of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StreamState:
    """One running stream.

    remaining: tokens still to compute until its next token can be sampled, that last one included.
    1 for a stream in decode; 0 or less if there is nothing to compute now.
    """

    id: str
    remaining: int
    follower: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A plain request, a group, or the admitted part of a group.

    rank: sorts units for preemption under the priority policy, the greatest goes first; unused
    under FCFS. missing: the streams of the group that still wait for admission.
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
    """A unit at the front of the waiting queue, in queue order. `lengths`: tokens of each stream in
    all."""

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    guided: bool = False


@dataclass(frozen=True, slots=True)
class Headroom:
    """Free KV blocks: in all, and what each role may still take (both equal `total` where the split
    is elastic)."""

    total: int
    leaders: int
    followers: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine as the policy sees it, just before a step.

    token_budget: tokens that the step may compute. chunk_limit: tokens that one stream may compute
    in the step, 0 for no limit. free_slots: further streams that may be admitted. drafting_slots:
    what each scheduled stream takes of the budget beside its tokens (a drafter's own rows, under
    speculation).
    """

    running: tuple[Unit, ...]
    waiting: tuple[WaitingUnit, ...]
    token_budget: int
    headroom: Headroom
    chunk_limit: int = 0
    free_slots: int = 0
    drafting_slots: int = 0
    by_rank: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do in the step.

    order: running streams in scheduling order. sampling: guided streams that may compute their last
    token, so that their logits are used. preempt: units to preempt, whole, first to last. promote:
    waiting streams that belong at the head of the queue.
    """

    order: tuple[str, ...]
    sampling: frozenset[str]
    preempt: tuple[Unit, ...] = ()
    promote: tuple[str, ...] = ()


class BlockNeeds(Protocol):
    """How many new KV blocks a stream needs to compute further tokens."""

    def at_most(self, num_tokens: int) -> int:
        """A cheap upper bound, for any stream."""

    def exactly(self, stream: str, num_tokens: int) -> int:
        """The exact number for this stream."""


@dataclass(slots=True)
class _Allotment:
    """Tokens granted to each stream, and the groups that may sample."""

    grants: list[tuple[StreamState, int]]
    sampling: set[str]
    budget: int
    drafting_slots: int


def plan(snapshot: Snapshot, needs: BlockNeeds) -> StepPlan:
    """Decide the next step. Terminates: each round preempts a unit, and one unit is never
    preempted."""
    evicted = [u for u in snapshot.running if u.half_admitted][1:]  # rule 4
    units = [u for u in snapshot.running if u not in evicted] if evicted else list(snapshot.running)
    allotment = _allot(units, snapshot)
    while len(units) > 1 and not _fits(allotment.grants, snapshot.headroom, needs):
        evicted.append(units.pop(_victim(units, snapshot.by_rank)))
        allotment = _allot(units, snapshot)
    sampling = allotment.sampling
    if not evicted:
        sampling |= _admissible(snapshot, allotment, needs)
    return StepPlan(
        order=tuple(s.id for u in units for s in u.streams),
        sampling=frozenset(sampling),
        preempt=tuple(evicted),
        promote=next((u.missing for u in units if u.half_admitted), ()),
    )


def all_may_decode(num_tokens: int, num_blocks: int, token_budget: int, headroom: Headroom) -> bool:
    """Whether streams in decode that need at most so many tokens and blocks go on for certain, as
    `plan` would say."""
    return num_tokens <= token_budget and num_blocks <= min(
        headroom.total, headroom.leaders, headroom.followers
    )


def _victim(units: Sequence[Unit], by_rank: bool) -> int:
    """Index of the unit to preempt next: the last one, or under the priority policy the greatest
    rank."""
    if not by_rank:
        return len(units) - 1
    return max(range(len(units)), key=lambda i: (units[i].rank, i))


def _allot(units: Sequence[Unit], snapshot: Snapshot) -> _Allotment:
    """Deal the token budget out in order (rules 1 and 2)."""
    out = _Allotment([], set(), snapshot.token_budget, snapshot.drafting_slots)
    limit = snapshot.chunk_limit or snapshot.token_budget
    for unit in units:
        if unit.guided:
            _allot_guided(unit, limit, out)
        else:
            _grant(unit.streams[0], unit.streams[0].remaining, limit, out)
    return out


def _allot_guided(unit: Unit, limit: int, out: _Allotment) -> None:
    """A joint step if the whole unit is there and fits; else everything but each stream's last
    token."""
    remaining = [s.remaining for s in unit.streams]
    needed = sum(remaining) + out.drafting_slots * len(remaining)
    joint = (
        not unit.half_admitted
        and min(remaining) >= 1
        and max(remaining) <= limit
        and needed <= out.budget
    )
    for stream in unit.streams:
        _grant(stream, stream.remaining if joint else stream.remaining - 1, limit, out)
    if joint:
        out.sampling.update(s.id for s in unit.streams)


def _grant(stream: StreamState, wanted: int, limit: int, out: _Allotment) -> None:
    num_tokens = min(wanted, limit, out.budget - out.drafting_slots)
    if num_tokens > 0:
        out.grants.append((stream, num_tokens))
        out.budget -= num_tokens + out.drafting_slots


def _fits(grants: Sequence[tuple[StreamState, int]], headroom: Headroom, needs: BlockNeeds) -> bool:
    """Whether the free blocks cover all grants (rule 3): by the cheap bound, else exactly."""
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
    """Streams at the front of the queue that may sample in the step that admits them (rule 5).

    A guess on the safe side: prefix-cache hits are ignored and blocks bounded from above. The
    scheduler's net catches the rest.
    """
    budget, slots = allotment.budget, snapshot.free_slots
    free = min(snapshot.headroom.total, snapshot.headroom.leaders, snapshot.headroom.followers)
    free -= sum(needs.at_most(n) for _, n in allotment.grants)
    sampling: set[str] = set()
    for unit in snapshot.waiting:
        budget -= sum(unit.lengths) + snapshot.drafting_slots * len(unit.lengths)
        slots -= len(unit.lengths)
        free -= sum(needs.at_most(n) for n in unit.lengths)
        if budget < 0 or slots < 0 or free < 0 or 0 < snapshot.chunk_limit < max(unit.lengths):
            break
        if unit.guided:
            sampling.update(unit.ids)
    return sampling
