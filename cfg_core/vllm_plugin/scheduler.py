"""GuidedScheduler: vLLM's scheduler, with groups.

It makes the followers, asks `lockstep.plan` before each step, carries the plan out on vLLM's own queues, and
checks afterwards. Three hooks into vLLM's `schedule()` do it:

- before it: order of `running`, whole-group preemption, the queue's head (`_carry_out`);
- inside it: `_reserve_prefill_lookahead` keeps a stream that may not sample one token short of its end;
- after it: `_update_after_schedule` is the net. A stream that was scheduled to sample without its partners
  (a plan that vLLM could not follow) has that token taken back, and the worker drops the row.

So a token of a guided request is only ever emitted from a joint step (design, section 6, invariant 1).
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cfg_core import lockstep
from cfg_core.groups import Group, GroupTable
from cfg_core.vllm_plugin import compat, grammar_compilation, guided_tokens, outcome, remote_queues
from cfg_core.vllm_plugin.followers import is_guided, make_group
from cfg_core.vllm_plugin.kv_roles import KVRoles, split_pool
from cfg_core.vllm_plugin.pace import Pace
from cfg_core.vllm_plugin.snapshot import is_blocked, take_snapshot
from cfg_core.vllm_plugin.speculation import Speculation
from cfg_core.vllm_plugin.step import JointRow, StepGuidance, attach, failures_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
PRIVATE_NAMES = (
    f"{_SCHEDULER}._handle_blocked_waiting_request",
    f"{_SCHEDULER}._pause_state",
    f"{_SCHEDULER}._preempt_request",
    f"{_SCHEDULER}._reserve_prefill_lookahead",
    f"{_SCHEDULER}._update_after_schedule",
    f"{_SCHEDULER}.grammar_compile_error_reqs",
    f"{_SCHEDULER}.kv_cache_manager",
    f"{_SCHEDULER}.make_spec_decoding_stats",
    f"{_SCHEDULER}.num_lookahead_tokens",
    f"{_SCHEDULER}.num_prefill_lookahead",
    f"{_SCHEDULER}.num_spec_tokens",
    f"{_SCHEDULER}.use_v2_model_runner",
    "vllm.v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule",
    "vllm.v1.request:Request.is_prefill_chunk",
    "vllm.v1.request:Request.drop_stale_output",
    "vllm.v1.request:Request.num_stale_output_tokens",
    "vllm.v1.request:Request.spec_token_ids",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
)

HOOKS = (
    "schedule",
    "add_request",
    "finish_requests",
    "update_from_output",
    "_update_after_schedule",
    "_reserve_prefill_lookahead",
    "_handle_blocked_waiting_request",
    "_preempt_request",
    "make_spec_decoding_stats",
)
"""Methods of vLLM's schedulers that we override."""


class _Everything:
    """Contains whatever one asks for."""

    def __contains__(self, stream: object) -> bool:
        return True


EVERYTHING = _Everything()


class Steady(NamedTuple):
    """A step in which every running stream decoded. While `running` stays as it is, so does all of this."""

    running: list[Request]
    streams: frozenset[str]
    guidance: StepGuidance


class GuidedScheduler(Scheduler):
    """vLLM's scheduler, with groups. Without a group it runs vLLM's code alone.

    Where the configuration asks for async scheduling, making one makes a GuidedAsyncScheduler: vLLM decides on
    async scheduling after the engine's arguments have named this class.
    """

    _pause_state: PauseState

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> GuidedScheduler:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        chosen = GuidedAsyncScheduler if cls is GuidedScheduler and asynchronous else cls
        made: GuidedScheduler = super().__new__(chosen)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.check_hooks(AsyncScheduler, HOOKS)
        compat.check_hooks(StructuredOutputManager, grammar_compilation.HOOKS)
        remote_queues.mend()
        super().__init__(*args, **kwargs)
        compat.check_scheduler(self)
        compat.expose_stats()
        grammar_compilation.adopt(self.structured_output_manager, compat.grammar_limits_of(self.vllm_config))
        self._groups = GroupTable()
        self._roles = KVRoles(self.kv_cache_manager, self.requests, self.max_model_len, self.num_lookahead_tokens)
        self._drafting_slots = compat.drafting_slots(self.vllm_config)
        kv_split = compat.kv_split_of(self.vllm_config)
        self._split = split_pool(
            kv_split, self.kv_cache_manager, self._roles, self._groups.is_follower, self.max_model_len
        )
        self._sampling: Container[str] = frozenset()
        self._steady: Steady | None = None
        self._prompt_logprobs = outcome.KeptPromptLogprobs()
        cost = compat.draft_cost_of(self.vllm_config)
        self._pace = Pace.of(self.vllm_config)
        self._speculation = Speculation(self._groups, self.num_spec_tokens, cost)
        self._counts = dict.fromkeys(("groups_admitted", "joint_steps", "solo_rows", "group_preemptions"), 0)

    # -- a group's life ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request; a guided one becomes a group. Never raises for a bad one: the engine core must live."""
        if not is_guided(request) or request.request_id in self.requests:
            super().add_request(request)
            return
        made = make_group(request, self.max_model_len, self._split.fits)
        if made is None:
            self._fail(request)
            return
        group, follower = made
        super().add_request(request)
        self._groups.add(group)
        self._counts["groups_admitted"] += 1
        super().add_request(follower)

    def _fail(self, request: Request) -> None:
        """Finish a request with an error in the next step, without ever scheduling it.

        Admission (in the frontend) refuses such requests with a sentence; this is for frontends without it.
        """
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        request.structured_output_request = None
        super().add_request(request)
        self.grammar_compile_error_reqs.add(request.request_id)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Finish requests, each group as a whole. Returns the finished ones that a client knows of."""
        if request_ids is not None and self._groups:
            given = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            request_ids = given.union(*(g.streams for i in given if (g := self._groups.of(i)) is not None))
        finished = super().finish_requests(request_ids, finished_status)
        grammar_compilation.cancel_compilations(finished)
        followers = {r.request_id for r in finished if self._groups.is_follower(r.request_id)}
        for request in finished:
            self._forget(request.request_id)
        return [r for r in finished if r.request_id not in followers]

    def _forget(self, stream: str) -> None:
        group = self._groups.remove(stream)
        if group is not None:
            self._prompt_logprobs.forget(group.leader)
            self._speculation.forget(group.leader)

    # -- a step ------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step's work, as in vLLM; with groups, by `lockstep.plan`. None while the frontend is behind (pace.py)."""
        if self._pace.holds():
            return self._schedule_nothing(throttle_prefills)
        if not self._groups:
            return super().schedule(throttle_prefills)
        if self.num_spec_tokens:
            self._even_out_drafts()
        if self._stays_steady():
            self._sampling = EVERYTHING
            return super().schedule(throttle_prefills)
        self._steady = None
        pause = self._pause_state
        snapshot = take_snapshot(self, self._groups, self._split.headroom(), admits=pause == PauseState.UNPAUSED)
        plan = lockstep.plan(snapshot, self._roles)
        self._carry_out(plan)
        self._sampling = plan.sampling
        if plan.preempt and pause == PauseState.UNPAUSED:
            # vLLM admits nothing in a step that preempted; it does not know of ours.
            self._pause_state = PauseState.PAUSED_NEW
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = pause

    def _schedule_nothing(self, throttle_prefills: bool) -> SchedulerOutput:
        """vLLM's step with nothing in it, as in a pause."""
        pause, self._pause_state = self._pause_state, PauseState.PAUSED_ALL
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = pause

    def _stays_steady(self) -> bool:
        """Whether every running stream decodes, as in the last step, and nothing can stop or join them.

        The plan would then change nothing, and costs almost half as much as vLLM's own step (LOG.md).
        """
        steady, num_streams = self._steady, len(self.running)
        return (
            steady is not None
            and self.running == steady.running
            and (not self.waiting or num_streams >= self.max_num_active_reqs)
            and lockstep.all_may_decode(
                num_streams * (1 + self.num_spec_tokens + self._drafting_slots),
                num_streams * self._roles.at_most_running(1 + self.num_spec_tokens),
                compat.step_budget(self),
                self._split.headroom(),
            )
        )

    def _even_out_drafts(self) -> None:
        """Give all running streams of a group equally many drafts: as many as the one with the fewest, and no more
        than the longest has room for, or than pays. Drafts are the same tokens for all (the worker copies them)."""
        for group in self._groups:
            members = [self.requests[stream] for stream in group.streams]
            room = self.max_model_len - 2 - max(r.num_computed_tokens for r in members)
            fewest = min(room, self._speculation.planned(group.leader), *(len(r.spec_token_ids) for r in members))
            fewest = max(0, fewest)
            for request in members:
                if len(request.spec_token_ids) > fewest:
                    request.spec_token_ids = request.spec_token_ids[:fewest]

    def _carry_out(self, plan: lockstep.StepPlan) -> None:
        self.running = [self.requests[stream] for stream in plan.order]
        for unit in plan.preempt:
            self._preempt_unit(unit)
        if self.policy == SchedulingPolicy.FCFS:
            self._to_head(plan.promote)

    def _preempt_unit(self, unit: lockstep.Unit) -> None:
        """Preempt all streams of a unit; a group returns to the queue's head whole, leader first."""
        now = time.monotonic()
        for stream in reversed(unit.streams):
            self._preempt_request(self.requests[stream.id], now)
        group = self._groups.of(unit.streams[0].id)
        if group is not None:
            self._counts["group_preemptions"] += 1
            if unit.missing and self.policy == SchedulingPolicy.FCFS:
                self._to_head(group.streams)

    def _to_head(self, streams: tuple[str, ...]) -> None:
        """Move waiting streams to the head of the queue, in this order."""
        for stream in reversed(streams):
            request = self.requests[stream]
            if request in self.waiting:
                self.waiting.remove_request(request)
                self.waiting.prepend_request(request)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks here, for each stream it is about to schedule, how many tokens it may compute.

        A guided stream that may not sample in this step stops one token short of its end. A waiting stream of
        one token is let in all the same, with the placeholders for drafts that vLLM may have added (0 would end all
        admission of the step); the net drops its row.
        """
        allowed = max(num_new_tokens, 0)
        if self.num_prefill_lookahead:
            allowed = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if request.request_id in self._sampling or request.request_id not in self._groups:
            return allowed
        short: int = request.num_tokens + request.num_output_placeholders - 1 - num_computed_tokens
        if short <= 0 and request.status != RequestStatus.RUNNING:
            return allowed
        return min(allowed, max(short, 0))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request is ready.

        A follower is not before its leader (which may await a grammar), and no stream of a group is while output from
        before its preemption is in flight: what vLLM then does with it must be the same for all streams.
        """
        group = self._groups.of(request.request_id)
        if group is not None:
            leader = self.requests[group.leader]
            if request.num_stale_output_tokens or (request is not leader and is_blocked(leader)):
                return False
        ready: bool = super()._handle_blocked_waiting_request(request)
        return ready

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """vLLM's preemption. Where it drops the output in flight (a reset of the prefix cache), so it does for all
        streams of a group, those that were preempted before included."""
        super()._preempt_request(request, timestamp, drop_stale_output)
        group = self._groups.of(request.request_id)
        if request.drop_stale_output and group is not None:
            for member in (self.requests[stream] for stream in group.streams):
                member.drop_stale_output |= member.num_stale_output_tokens > 0

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """After scheduling: tell the worker which rows are joint, and take solo samples back (the net)."""
        if self.num_spec_tokens and self._groups:
            self._plan_drafts(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        self._sampling = frozenset()
        if not self._groups:
            return
        all_decode = not any(request.is_prefill_chunk for request in self.running)
        scheduled, steady = scheduler_output.num_scheduled_tokens.keys(), self._steady
        if steady is not None and all_decode and scheduled == steady.streams and not self.num_spec_tokens:
            guidance: StepGuidance | None = steady.guidance
        else:
            guidance = self._guidance(scheduler_output)
        if guidance is None:
            return
        attach(scheduler_output, guidance)
        self._counts["joint_steps"] += len(guidance.joint)
        self._counts["solo_rows"] += len(guidance.solo)
        if steady is None and all_decode and not guidance.solo and len(scheduled) == len(self.running):
            self._steady = Steady(list(self.running), frozenset(scheduled), guidance)

    def _plan_drafts(self, scheduler_output: SchedulerOutput) -> None:
        """Decide how many drafts each group gets next, and let the drafter stop where nobody wants more."""
        scheduled = scheduler_output.num_scheduled_tokens
        leaders = [group.leader for group in self._scheduled_groups(scheduler_output)]
        most = self._speculation.plan(leaders)
        if all(stream in self._groups for stream in scheduled):
            drafts = scheduler_output.num_spec_tokens_to_schedule
            scheduler_output.num_spec_tokens_to_schedule = min(drafts, most)

    def _guidance(self, scheduler_output: SchedulerOutput) -> StepGuidance | None:
        """Who is joint in this step, and who is solo (or has other drafts than its partners); these are taken back."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        joint: list[JointRow] = []
        solo: list[str] = []
        for group in self._scheduled_groups(scheduler_output):
            ready = [s for s in group.streams if self._samples(s, scheduler_output)]
            if len(ready) == len(group.streams) and len({len(drafts.get(s, ())) for s in ready}) == 1:
                joint.append(JointRow(group.streams, group.weights, group.logprobs))
            else:
                solo += ready
        for stream in solo:
            self._take_back(self.requests[stream], len(drafts.get(stream, ())))
        if not joint and not solo:
            return None
        return StepGuidance(tuple(joint), tuple(solo), self._drafter_rests(scheduler_output))

    def _drafter_rests(self, scheduler_output: SchedulerOutput) -> bool:
        """Not where ranks of data parallelism must step together."""
        alone: bool = self.parallel_config.data_parallel_size == 1
        return alone and self._speculation.rests(scheduler_output.num_scheduled_tokens)

    def _scheduled_groups(self, scheduler_output: SchedulerOutput) -> Iterable[Group]:
        groups = (self._groups.of(stream) for stream in scheduler_output.num_scheduled_tokens)
        return {g.leader: g for g in groups if g is not None}.values()

    def _samples(self, stream: str, scheduler_output: SchedulerOutput) -> bool:
        return stream in scheduler_output.num_scheduled_tokens and not self.requests[stream].is_prefill_chunk

    def _take_back(self, request: Request, num_drafts: int) -> None:
        """Undo the last token of a stream that would have sampled alone; it is computed again in a joint step. So are
        its drafts.

        Not before the first pipeline stages have heard of it, which takes as many steps as there are stages.
        """
        request.num_computed_tokens -= 1 + num_drafts
        request.is_prefill_chunk = True
        request.spec_token_ids = []
        request.next_decode_eligible_step = self.current_step + self.parallel_config.pipeline_parallel_size

    # -- its outcome -------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """vLLM's bookkeeping of a finished step, with the followers hidden and finished with their leaders."""
        failures = failures_of(model_runner_output)
        if failures:
            outcome.drop_output(failures, model_runner_output)
            for request_id in failures:
                self._prompt_logprobs.forget(request_id)
            self.grammar_compile_error_reqs.update(failures)
        uncompiled = grammar_compilation.uncompiled(self.requests, self.grammar_compile_error_reqs)
        outputs = self._update_from_output(scheduler_output, model_runner_output)
        unmatched = grammar_compilation.take_failures(self.structured_output_manager)
        outcome.tell_reasons({**uncompiled, **unmatched, **failures}, outputs)
        self._pace.sent(outputs)
        return outputs

    def _update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        if not self._groups:
            return super().update_from_output(scheduler_output, model_runner_output)
        touched, guidance = list(self._scheduled_groups(scheduler_output)), StepGuidance.of(scheduler_output)
        if guidance is not None:
            self._prompt_logprobs.exchange(guidance, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._close(touched)
        outcome.hide({follower for group in touched for follower in group.followers}, outputs)
        outcome.narrow_logprobs(guidance, outputs)
        guided_tokens.mark(guidance, outputs)
        return outputs

    def _close(self, groups: list[Group]) -> None:
        """Finish the followers of finished leaders. A leader never outlives a follower: equal `max_tokens`."""
        for group in groups:
            if group.leader not in self.requests and group.leader in self._groups:
                super().finish_requests(group.followers, RequestStatus.FINISHED_ABORTED)
                self._forget(group.leader)

    def make_spec_decoding_stats(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, request_id: str, **kwargs: Any
    ) -> Any:
        """vLLM's count of accepted drafts; a group counts once."""
        if self._groups.is_follower(request_id):
            return stats
        self._speculation.observe(request_id, num_draft_tokens, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            stats, num_draft_tokens, num_accepted_tokens, *args, request_id=request_id, **kwargs
        )

    # -- what others may ask -----------------------------------------------------------------------------------

    def guidance_stats(self) -> dict[str, int]:
        """Counters since start, and what is held now. Blocks are physical; one shared by both roles counts in each."""
        leaders = self._roles.held(s for s in self.requests if not self._groups.is_follower(s))
        followers = self._roles.held(f for g in self._groups for f in g.followers)
        num_running, num_waiting = self.get_request_counts()
        return {
            "running": num_running,
            "waiting": num_waiting,
            "queued_prefill_tokens": sum(
                max(0, r.num_tokens - r.num_computed_tokens - 1) for r in self.requests.values()
            ),
            "max_num_seqs": self.max_num_running_reqs,
            "max_model_len": self.max_model_len,
            "held_ms": int(1000 * self._pace.held_s),
            "groups": len(self._groups),
            **self._counts,
            **self._speculation.stats(),
            "free_blocks": self._roles.free,
            "total_blocks": self._roles.total,
            "block_size": self.block_size,
            "leader_blocks": len(leaders),
            "follower_blocks": len(followers),
        }

    def check_integrity(self) -> None:
        """Assert what must hold between steps (design, section 6, invariant 2). For tests."""
        self._groups.check_integrity()
        for group in self._groups:
            outputs = [list(self.requests[s].output_token_ids) for s in group.streams]
            assert all(o == outputs[0] for o in outputs), group
        self._prompt_logprobs.check_integrity([group.leader for group in self._groups])
        self._speculation.check_integrity()


class GuidedAsyncScheduler(GuidedScheduler, AsyncScheduler):
    """GuidedScheduler over vLLM's AsyncScheduler: a step is scheduled while the tokens of the last are in flight."""

    def _take_back(self, request: Request, num_drafts: int) -> None:
        super()._take_back(request, num_drafts)
        request.num_output_placeholders -= 1 + num_drafts
        if not self.use_v2_model_runner:
            # V1 has the input token of a decode from its step before, on the device only. A step later, it is sent.
            request.next_decode_eligible_step += 1
