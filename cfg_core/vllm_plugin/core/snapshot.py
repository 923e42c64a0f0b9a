"""vLLM's scheduler as `lockstep.plan` sees it, just before a step, and steps that need no plan.

This only reads the scheduler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Set
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cfg_core.policy.groups import Group, GroupTable
from cfg_core.policy.lockstep import Headroom, Snapshot, StreamState, Unit, WaitingUnit
from cfg_core.vllm_plugin import config
from cfg_core.vllm_plugin.core import media
from cfg_core.vllm_plugin.wire import StepGuidance

if TYPE_CHECKING:
    from vllm.v1.request import Request


WAITING_WINDOW = 64
"""Number of waiting requests, from the head of the queue, that a snapshot looks at.

It looks for groups that may sample in the step that admits them.
"""


def take_snapshot(
    scheduler: Scheduler,
    groups: GroupTable,
    headroom: Headroom,
    *,
    admits: bool,
    likely_hits: Callable[[Request], int],
    held: Collection[str] = (),
    joint_limit: int = 0,
    is_suffixed: Callable[[str], bool] = lambda leader: False,
) -> Snapshot:
    """The engine before its next step.

    admits: whether that step may admit waiting requests.
    likely_hits: how many tokens of a waiting stream are believed to be in the prefix cache.
    held: running streams that must compute nothing in it.
    joint_limit: see `Snapshot`.
    is_suffixed: whether a leader computes its suffix in it.
    """
    return Snapshot(
        running=tuple(_running_units(scheduler, groups, held, is_suffixed)),
        waiting=tuple(_waiting_units(scheduler, groups, likely_hits)) if admits else (),
        token_budget=config.step_budget(scheduler),
        headroom=headroom,
        chunk_limit=_chunk_limit(scheduler),
        free_slots=scheduler.max_num_active_reqs - len(scheduler.running),
        drafting_slots=config.drafting_slots(scheduler.vllm_config),
        by_rank=scheduler.policy == SchedulingPolicy.PRIORITY,
        media_room=media.room_of(scheduler),
        joint_limit=joint_limit,
    )


class SteadyStep(NamedTuple):
    """A step in which every running stream decoded, and all groups were joint.

    While `running` does not change, the next step can be like it, with the same guidance. A plan
    would change nothing, and costs almost half as much as vLLM's own step.
    """

    running: list[Request]
    streams: frozenset[str]
    guidance: StepGuidance

    @classmethod
    def of(
        cls, running: list[Request], scheduled: Set[str], guidance: StepGuidance
    ) -> SteadyStep | None:
        """The step that was just scheduled, if it was steady."""
        if guidance.solo or len(scheduled) != len(running):
            return None
        return cls(list(running), frozenset(scheduled), guidance)


def is_blocked(request: Request) -> bool:
    """Whether a waiting request waits for something other than its turn, such as its grammar."""
    return bool(Scheduler._is_blocked_waiting_status(request.status))


def _chunk_limit(scheduler: Scheduler) -> int:
    """`long_prefill_token_threshold` as vLLM applies it in the next step; 0 for no limit."""
    limit = scheduler.scheduler_config.long_prefill_token_threshold
    eligible = sum(scheduler.get_request_counts())
    if limit <= 0 or eligible <= 1:
        return 0
    if scheduler.adaptive_long_prefill_threshold:
        limit = max(limit, scheduler.scheduler_config.max_num_batched_tokens // eligible)
    return int(limit)


def _running_units(
    scheduler: Scheduler,
    groups: GroupTable,
    held: Collection[str],
    is_suffixed: Callable[[str], bool],
) -> Iterator[Unit]:
    """Running requests as units, each group at the place of its first running stream."""
    by_rank = scheduler.policy == SchedulingPolicy.PRIORITY
    seen: set[str] = set()
    for request in scheduler.running:
        rank = (request.priority, request.arrival_time) if by_rank else ()
        group = groups.of(request.request_id)
        if group is None:
            yield Unit((_state(scheduler, request, held),), rank=rank)
        elif group.leader not in seen:
            seen.add(group.leader)
            end = 1 + (len(group.suffix) if is_suffixed(group.leader) else 0)
            yield _group_unit(scheduler, group, rank, held, end)


def _group_unit(
    scheduler: Scheduler, group: Group, rank: tuple[float, ...], held: Collection[str], end: int
) -> Unit:
    members = [scheduler.requests[stream] for stream in group.streams]
    running = [r for r in members if r.status == RequestStatus.RUNNING]
    return Unit(
        streams=tuple(
            _state(scheduler, r, held, r.request_id != group.leader, end) for r in running
        ),
        guided=True,
        missing=tuple(r.request_id for r in members if r.status != RequestStatus.RUNNING),
        rank=rank,
    )


def _state(
    scheduler: Scheduler,
    request: Request,
    held: Collection[str],
    follower: bool = False,
    end: int = 1,
) -> StreamState:
    remaining = (
        request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    )
    if scheduler.current_step + 1 < request.next_decode_eligible_step:
        remaining = 0  # its last token is still in the pipeline, so vLLM skips it
    if request.request_id in held:
        remaining = 0
    items = media.items_of(scheduler, request, request.num_computed_tokens)
    drafts = len(request.spec_token_ids)
    return StreamState(request.request_id, remaining, follower, items, end, drafts)


def _waiting_units(
    scheduler: Scheduler, groups: GroupTable, likely_hits: Callable[[Request], int]
) -> Iterator[WaitingUnit]:
    """Units of the head of the waiting queue, up to the first request that is not ready.

    The prefix cache is looked at only for groups that no step could compute whole without it. A
    group with a suffix does not sample in the step that admits it: vLLM adds no drafts to a prompt
    then.
    """
    front = list(itertools.islice(scheduler.waiting, WAITING_WINDOW))
    budget = _chunk_limit(scheduler) or config.step_budget(scheduler)
    i = 0
    while i < len(front) and not is_blocked(front[i]):
        group = groups.of(front[i].request_id)
        size = 1
        if (
            group is not None
            and tuple(r.request_id for r in front[i : i + len(group.streams)]) == group.streams
        ):
            size = len(group.streams)
        members = front[i : i + size]
        lengths = tuple(r.num_tokens for r in members)
        is_long = size > 1 and sum(lengths) > budget
        yield WaitingUnit(
            tuple(r.request_id for r in members),
            lengths,
            guided=size > 1,
            media=tuple(media.items_of(scheduler, r, r.num_computed_tokens) for r in members),
            cached=tuple(map(likely_hits, members)) if is_long else (),
        )
        i += size
