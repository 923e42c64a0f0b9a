"""GuidedScheduler: vLLM's scheduler, with groups.

It asks `lockstep.plan` before each step, carries the plan out on vLLM's own queues, and checks the
result. (group_scheduler.py begins and ends groups.) It uses three hooks around vLLM's `schedule()`:

- Before it, `_carry_out` orders `running`, preempts whole groups, and moves streams to the head of
  the waiting queue.
- Inside it, `_reserve_prefill_lookahead` keeps a stream that may not sample one token short of its
  end.
- After it, `_update_after_schedule` is the safety net. If vLLM could not follow the plan, a stream
  may be scheduled to sample without its partners. Then that token is taken back, and the worker
  drops the row. From a recurrent state it cannot be taken back, so the group is computed again
  (states.py).

So a token of a guided request is emitted only from a joint step (ARCHITECTURE.md, "What must
hold"). The methods of one step run in this order: schedule, _update_after_schedule,
update_from_output.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from cfg_core.policy import lockstep
from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin import config, wire
from cfg_core.vllm_plugin.core.group_scheduler import GroupScheduler
from cfg_core.vllm_plugin.core.scoring import reads_of, scoring_of
from cfg_core.vllm_plugin.core.snapshot import SteadyStep, is_blocked, take_snapshot
from cfg_core.vllm_plugin.core.suffixes import is_complete
from cfg_core.vllm_plugin.wire import JointRow, StepGuidance, SuffixTokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Everything:
    """A container that contains every stream."""

    def __contains__(self, stream: object) -> bool:
        return True


EVERYTHING = _Everything()


class GuidedScheduler(GroupScheduler):
    """vLLM's scheduler, with groups. Without a group, only vLLM's own code decides.

    If the configuration asks for async scheduling, the constructor makes a GuidedAsyncScheduler.
    The engine's arguments cannot name that class, because vLLM decides on async scheduling after it
    has read them.
    """

    _pause_state: PauseState
    running: list[Request]

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> GuidedScheduler:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        chosen = GuidedAsyncScheduler if cls is GuidedScheduler and asynchronous else cls
        made: GuidedScheduler = super().__new__(chosen)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafting_slots = config.drafting_slots(self.vllm_config)
        self._sampling: Container[str] = frozenset()
        self._steady: SteadyStep | None = None

    @override
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step as vLLM does. If there are groups, follow `lockstep.plan`.

        Nothing is scheduled while the frontend is behind (pace.py).
        """
        pause = self._pause_state
        try:
            if self._pace.holds():
                self._pause_state = PauseState.PAUSED_ALL
            else:
                self._plan_step()
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = pause

    def _plan_step(self) -> None:
        """Bring vLLM's queues into the state that the plan of this step wants."""
        if self._states:
            self._recompute()
        if self._timelines:
            self._advance_timelines()
        self._held = self._timelines.held | self._probes.held
        if not self._groups:
            return
        if self.num_spec_tokens:
            self._even_out_drafts()
        if self._suffixes:
            self._suffixes.place(self._held, self._probes.coming(len(self.running)))
        if self._stays_steady():
            self._sampling = EVERYTHING
            return
        self._steady = None
        admits = self._pause_state == PauseState.UNPAUSED
        snapshot = take_snapshot(
            self,
            self._groups,
            self._split.headroom(),
            admits=admits,
            likely_hits=self._likely_hits,
            held=self._held,
            joint_limit=self._states.joint_limit,
            is_suffixed=self._suffixes.is_placed,
        )
        plan = lockstep.plan(snapshot, self._roles)
        self._carry_out(plan)
        self._sampling = plan.sampling
        if plan.preempt:
            self._admit_nothing()

    def _admit_nothing(self) -> None:
        """As vLLM in a step with preemptions. It does not know of ours."""
        if self._pause_state == PauseState.UNPAUSED:
            self._pause_state = PauseState.PAUSED_NEW

    def _recompute(self) -> None:
        """Preempt the groups whose recurrent states contain a token that was taken back."""
        spoilt = self._states.take_spoilt(self.requests)
        self.running = [request for request in self.running if request not in spoilt]
        self._preempt(spoilt)
        self._counts["recomputed_streams"] += len(spoilt)
        self._steady = None
        self._admit_nothing()

    def _advance_timelines(self) -> None:
        """Open and close windows whose time has come."""
        changes = self._timelines.advance(self._probes.in_flight)
        for plan in changes.closing:
            self._end_window(plan)
        for plan in changes.opening:
            self._begin(plan)
            if self.policy == SchedulingPolicy.FCFS:
                self._to_head(plan.group.streams)
        self._counts["windows_closed"] += len(changes.closing)
        self._counts["windows_opened"] += len(changes.opening)
        if changes:
            self._steady = None

    def _stays_steady(self) -> bool:
        """Whether every running stream decodes, as in the last step, and nothing can prevent it."""
        steady, num_streams = self._steady, len(self.running)
        return (
            steady is not None
            and self.running == steady.running
            and (not self.waiting or num_streams >= self.max_num_active_reqs)
            and lockstep.all_may_decode(
                num_streams * (1 + self.num_spec_tokens + self._drafting_slots)
                + self._suffixes.num_tokens,
                num_streams * self._roles.at_most_running(1 + self.num_spec_tokens)
                + self._suffixes.blocks(self._roles.at_most_running),
                config.step_budget(self),
                self._split.headroom(),
            )
        )

    def _even_out_drafts(self) -> None:
        for group in self._groups:
            members = [self.requests[stream] for stream in group.streams]
            self._speculation.even_out(group.leader, members, self.max_model_len)

    def _carry_out(self, plan: lockstep.StepPlan) -> None:
        self.running = [self.requests[stream] for stream in plan.order]
        for unit in plan.preempt:
            self._preempt_unit(unit)
        if self.policy == SchedulingPolicy.FCFS:
            self._to_head(plan.promote)

    def _preempt_unit(self, unit: lockstep.Unit) -> None:
        """Preempt all streams of a unit.

        A group returns to the head of the queue, its leader first.
        """
        self._preempt([self.requests[stream.id] for stream in unit.streams])
        group = self._groups.of(unit.streams[0].id)
        if group is not None:
            self._counts["group_preemptions"] += 1
            if unit.missing and self.policy == SchedulingPolicy.FCFS:
                self._to_head(group.streams)

    def _preempt(self, requests: Sequence[Request]) -> None:
        now = time.monotonic()
        for request in reversed(requests):
            self._preempt_request(request, now)

    def _to_head(self, streams: tuple[str, ...]) -> None:
        """Move waiting streams to the head of the queue, in this order."""
        for stream in reversed(streams):
            request = self.requests[stream]
            if request in self.waiting:
                self.waiting.remove_request(request)
                self.waiting.prepend_request(request)

    @override
    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """How many tokens a stream that vLLM is about to schedule may compute.

        A stream that is held computes nothing. A guided stream that may not sample in this step
        stops one token short of its end. A waiting stream that needs only one token is admitted
        anyway, with the placeholders for drafts that vLLM may have added: returning 0 would make
        vLLM stop admitting requests in this step. The safety net then drops its row.
        """
        allowed = max(num_new_tokens, 0)
        if request.request_id in self._held:
            return 0
        if self.num_prefill_lookahead:
            allowed = super()._reserve_prefill_lookahead(
                request, num_computed_tokens, num_new_tokens
            )
        if request.request_id in self._sampling or request.request_id not in self._groups:
            return allowed
        end: int = request.num_tokens + request.num_output_placeholders
        short = end - 1 - num_computed_tokens
        if short <= 0 and request.status != RequestStatus.RUNNING:
            return allowed
        return min(allowed, max(short, 0))

    @override
    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request is ready.

        A follower waits for its leader, which may wait for its grammar. No stream of a group is
        ready while output from before its preemption is in flight, because vLLM must treat that
        output in the same way for all streams. The same holds for a request whose window may open
        or close: its next token is not known, and followers of the same name may be in flight.
        """
        if request.num_stale_output_tokens and request.request_id in self._timelines:
            return False
        group = self._groups.of(request.request_id)
        if group is not None:
            leader = self.requests[group.leader]
            if request.num_stale_output_tokens or (request is not leader and is_blocked(leader)):
                return False
        ready: bool = super()._handle_blocked_waiting_request(request)
        return ready

    @override
    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """Preempt a request as vLLM does.

        If vLLM drops the output in flight (a reset of the prefix cache), the output of all streams
        of the group is dropped. That includes streams that were preempted before.
        """
        super()._preempt_request(request, timestamp, drop_stale_output)
        if request.drop_stale_output:
            self._timelines.step_back(request.request_id)
        group = self._groups.of(request.request_id)
        if request.drop_stale_output and group is not None:
            for member in (self.requests[stream] for stream in group.streams):
                member.drop_stale_output |= member.num_stale_output_tokens > 0

    # --- after scheduling: the safety net ---------------------------------------------------------

    @override
    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Tell the workers which rows are joint, and take solo samples back."""
        if self.num_spec_tokens and self._groups:
            self._plan_drafts(scheduler_output)
        self._begun.complete(scheduler_output, self.requests)
        suffixes = self._suffixes.take(scheduler_output) if self._suffixes else ()
        super()._update_after_schedule(scheduler_output)
        self._suffixes.forget(suffixes)
        self._sampling = frozenset()
        if not self._groups:
            return
        all_decode = not any(request.is_prefill_chunk for request in self.running)
        guidance = self._guidance(scheduler_output, all_decode, suffixes)
        if guidance is None:
            return
        wire.attach(scheduler_output, guidance)
        self._probes.scheduled(scheduler_output, guidance)
        self._counts["joint_steps"] += sum(not row.probe for row in guidance.joint)
        self._counts["solo_rows"] += len(guidance.solo)
        if self._steady is None and all_decode and not guidance.scores:
            scheduled = scheduler_output.num_scheduled_tokens.keys()
            self._steady = SteadyStep.of(self.running, scheduled, guidance)

    def _plan_drafts(self, scheduler_output: SchedulerOutput) -> None:
        """Decide how many drafts each group gets next.

        If only groups are in the step, the drafter makes no more drafts than the largest of these
        numbers. Where it must make all of them, the groups leave some unused.
        """
        leaders = [group.leader for group in self._scheduled_groups(scheduler_output)]
        alone = self._may_draft_fewer and all(
            stream in self._groups for stream in scheduler_output.num_scheduled_tokens
        )
        is_measured = alone and self._speculation.measures(leaders)
        most = self._speculation.plan(leaders, scheduler_output, is_measured)
        if alone:
            drafts = scheduler_output.num_spec_tokens_to_schedule
            scheduler_output.num_spec_tokens_to_schedule = min(drafts, most)
        if is_measured:
            self._speculation.begin(scheduler_output)

    def _guidance(
        self,
        scheduler_output: SchedulerOutput,
        all_decode: bool,
        suffixes: tuple[SuffixTokens, ...] = (),
    ) -> StepGuidance | None:
        """Find the joint groups and the solo streams of this step, and take solo samples back.

        A stream is also solo if it has another number of drafts than its partners, or if some of
        its suffix is missing and it is no probe. Returns None if no stream of a group samples or
        reads scored tokens.
        """
        steady, scheduled = self._steady, scheduler_output.num_scheduled_tokens
        if (
            steady is not None
            and all_decode
            and not self.num_spec_tokens
            and scheduled.keys() == steady.streams
            and suffixes == steady.guidance.suffixes
        ):
            return steady.guidance
        drafts = scheduler_output.scheduled_spec_decode_tokens
        groups = self._scheduled_groups(scheduler_output)
        reads = reads_of(groups, self.requests, scheduled)
        taken = dict(suffixes)
        joint: list[JointRow] = []
        solo: list[str] = []
        for group in groups:
            ready = [s for s in group.streams if self._samples(s, scheduler_output)]
            lengths = {len(drafts.get(s, ())) for s in ready}
            suffix = taken.get(group.leader, ())
            is_whole = len(ready) == len(group.streams) and len(lengths) == 1
            probe = self._probes.row(group, suffix) if is_whole else None
            if probe is not None:
                joint.append(probe)
            elif is_whole and is_complete(group, suffix):
                joint.append(self._joint_row(group))
            else:
                solo += ready
        for stream in solo:
            self._take_back(self.requests[stream], len(drafts.get(stream, ())))
            self._states.note_taken_back(self.requests[stream], self._groups.of(stream))
        if not joint and not solo and not reads:
            return None
        rests = self._speculation.rests(scheduled, taken)
        return StepGuidance(tuple(joint), tuple(solo), rests, tuple(reads), suffixes)

    def _joint_row(self, group: Group) -> JointRow:
        weights = self._timelines.weights(group.leader) or group.weights
        scoring = scoring_of(group, self.requests[group.leader])
        if scoring is not None:
            self._counts["scored_tokens"] += len(scoring.tokens)
        return JointRow(group, weights, scoring)

    def _samples(self, stream: str, scheduler_output: SchedulerOutput) -> bool:
        scheduled = scheduler_output.num_scheduled_tokens
        return stream in scheduled and not self.requests[stream].is_prefill_chunk

    def _take_back(self, request: Request, num_drafts: int) -> None:
        """Undo the last token of a stream that would have sampled alone, and its drafts.

        The token is computed again in a joint step. The first pipeline stages learn of a sample as
        many steps later as there are stages, so the stream is not scheduled earlier.
        """
        request.num_computed_tokens -= 1 + num_drafts
        request.is_prefill_chunk = True
        request.spec_token_ids = []
        stages = self.parallel_config.pipeline_parallel_size
        request.next_decode_eligible_step = self.current_step + stages


class GuidedAsyncScheduler(GuidedScheduler, AsyncScheduler):
    """GuidedScheduler over vLLM's AsyncScheduler.

    A step is scheduled while the tokens of the last step are in flight.
    """

    @override
    def _take_back(self, request: Request, num_drafts: int) -> None:
        super()._take_back(request, num_drafts)
        request.num_output_placeholders -= 1 + num_drafts
        if not self.use_v2_model_runner:
            # V1 has the input token of a decode only on the device, from the step before. One step
            # later the host sends it.
            request.next_decode_eligible_step += 1
