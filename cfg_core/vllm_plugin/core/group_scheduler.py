"""GroupScheduler: vLLM's scheduler, in which a leader and its followers begin and end together.

It makes the followers of a guided request, hides them from clients, and finishes them with their
leader or at the end of their window. scheduler.py decides when they run, and makes them sample
together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from cfg_core.errors import REQUEST_FAULT, GuidanceError
from cfg_core.policy.groups import Group, GroupTable, output_of_followers
from cfg_core.vllm_plugin import config, drafters, versions, vllm_patches, wire
from cfg_core.vllm_plugin.core import begun, grammar_manager, outcome, scoring, stats
from cfg_core.vllm_plugin.core.followers import (
    GroupPlan,
    asks_for_guidance,
    make_followers,
    plan_group,
)
from cfg_core.vllm_plugin.core.gates import Probes
from cfg_core.vllm_plugin.core.kv_roles import KVRoles, split_pool
from cfg_core.vllm_plugin.core.speculation import Speculation
from cfg_core.vllm_plugin.core.states import States
from cfg_core.vllm_plugin.core.suffixes import Suffixes
from cfg_core.vllm_plugin.core.timelines import Timelines
from cfg_core.vllm_plugin.pace import Pace
from cfg_core.vllm_plugin.wire import StepGuidance, StreamColumns

logger = logging.getLogger(__name__)


class GroupScheduler(Scheduler):
    """vLLM's scheduler, with groups. Used through its subclasses in scheduler.py."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config.check_overrides(type(self))
        vllm_patches.apply("engine core")
        super().__init__(*args, **kwargs)
        ours = self.vllm_config
        config.check_version_of(ours)
        self._cannot_guide = config.cannot_guide(ours)
        if self._cannot_guide is not None:
            logger.warning("%s", config.refusal(self._cannot_guide))
        grammar_manager.adopt(self.structured_output_manager, config.grammar_limits_of(ours))
        self._groups = GroupTable()
        self._refused: dict[str, str] = {}  # why, until the next step tells it
        self._begun = begun.BegunRequests()
        manager, limit = self.kv_cache_manager, self.max_model_len
        self._roles = KVRoles(manager, self.requests, limit, self.num_lookahead_tokens)
        self._split = split_pool(
            config.kv_split_of(ours), manager, self._roles, self._groups.is_follower, limit
        )
        self._states = States(self)
        scoring.limit_hits(manager, self._most_hits)
        self._pace = Pace.of(ours)
        self._is_traced = config.is_traced(ours)
        cost = config.draft_cost_of(ours)
        self._may_draft_fewer = not drafters.must_make_all(ours)
        rest = drafters.why_groups_rest(ours)
        if rest is not None:
            logger.warning("Guided requests get no drafts from %s.", rest)
        self._suffixes = Suffixes(self.requests)
        self._probes = Probes(
            self.requests,
            saves=self.parallel_config.pipeline_parallel_size == 1,
            asynchronous=self.scheduler_config.async_scheduling,
            holds=not self.use_v2_model_runner,
            drafts=self.num_spec_tokens > 0,
        )
        self._speculation = Speculation(
            self._groups,
            self.requests,
            self.num_spec_tokens,
            cost,
            self._may_draft_fewer,
            for_groups=rest is None,
            probes=self._probes,
        )
        self._timelines = Timelines(self._groups, self.requests, self.num_spec_tokens)
        self._held: frozenset[str] = frozenset()  # streams that the coming step must leave out
        names = (
            "groups_admitted",
            "joint_steps",
            "solo_rows",
            "recomputed_streams",
            "group_preemptions",
            "guided_tokens",
            "full_strength_tokens",
            "gate_closed_tokens",
            "windows_opened",
            "windows_closed",
            "scored_tokens",
        )
        self._counts = dict.fromkeys(names, 0)

    def _scheduled_groups(self, scheduler_output: SchedulerOutput) -> Iterable[Group]:
        groups = (self._groups.of(stream) for stream in scheduler_output.num_scheduled_tokens)
        return {group.leader: group for group in groups if group is not None}.values()

    # --- a group begins and ends ------------------------------------------------------------------

    @override
    def add_request(self, request: Request) -> None:
        """Add a request; a guided one becomes a group.

        Never raises for a bad request: that would end the engine core.
        """
        begun.make_begun(request)
        if (refused := begun.refusal(request)) is not None:
            self._fail(request, f"{REQUEST_FAULT}{refused}")
            return
        if not asks_for_guidance(request) or request.request_id in self.requests:
            super().add_request(request)
            self._begun.add(request)
            return
        try:
            plan = self._plan(request)
        except GuidanceError as error:
            self._fail(request, f"{REQUEST_FAULT}{error.message}")
            return
        if plan.group.scored is not None:
            scoring.hide_from_vllm(request)
        super().add_request(request)
        self._begun.add(request)
        self._counts["groups_admitted"] += 1
        if plan.timeline is not None:
            self._timelines.add(plan)
        if plan.timeline is None or self._timelines.guides_first(plan):
            self._begin(plan)

    def _plan(self, leader: Request) -> GroupPlan:
        """The group of a guided request. Raises GuidanceError if it can never run."""
        if self._cannot_guide is not None:
            raise GuidanceError(config.refusal(self._cannot_guide))
        return plan_group(leader, self.max_model_len, self._fits)

    def _fits(self, leader_tokens: int, follower_tokens: Sequence[int], suffix: int) -> bool:
        """Whether a group whose streams end at these lengths can ever run.

        suffix: tokens of the leader's suffix, which its length contains.
        """
        streams = 1 + len(follower_tokens)
        rows = suffix + streams * config.rows_per_stream(self.vllm_config)
        return (
            streams <= self.max_num_active_reqs
            and rows <= config.step_budget(self)
            and not 0 < self.scheduler_config.long_prefill_token_threshold < 1 + suffix
            and self._split.fits(leader_tokens, follower_tokens)
        )

    def _most_hits(self, request: Request) -> int | None:
        """Tokens of a stream that may come from the prefix cache; None for no limit."""
        group = self._groups.of(request.request_id)
        if group is None:
            return None
        limits = [self._states.most_hits(request)]
        if group.scored is not None:
            limits.append(scoring.most_hits(group.scored, request, self.requests[group.leader]))
        return min((limit for limit in limits if limit is not None), default=None)

    def _likely_hits(self, request: Request) -> int:
        """Tokens of a waiting stream that are believed to be in the prefix cache."""
        hits, most = self._roles.likely_hits(request), self._most_hits(request)
        return hits if most is None else max(0, min(hits, most))

    def _begin(self, plan: GroupPlan) -> None:
        """Make the followers of a request, which have its output so far, and add them."""
        leader = self.requests[plan.group.leader]
        self._groups.add(plan.group)
        self._suffixes.add(plan.group)
        self._probes.add(plan.group)
        if plan.timeline is not None:
            self._timelines.open(plan)
        since = self._timelines.since(leader.request_id)
        for follower in make_followers(leader, plan, self._is_traced, since):
            super().add_request(follower)

    def _end_window(self, plan: GroupPlan) -> None:
        """Free the followers of a group. Its leader goes on as a plain request.

        Its next drafts are as many as the group would have had, whatever others made in that step,
        so that a text with a seed does not depend on them.
        """
        leader = self.requests[plan.group.leader]
        self._speculation.even_out(plan.group.leader, [leader], self.max_model_len)
        self._groups.remove(plan.group.leader)
        self._suffixes.remove(plan.group.leader)
        self._probes.remove(plan.group.leader)
        self._speculation.forget(plan.group.leader)
        self._timelines.close(plan.group.leader)
        super().finish_requests(plan.group.followers, RequestStatus.FINISHED_ABORTED)

    def _fail(self, request: Request, reason: str) -> None:
        """Finish a request with an error in the next step, without ever scheduling it."""
        self._refused[request.request_id] = reason
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        request.structured_output_request = None
        super().add_request(request)
        versions.chosen().fail_requests(self, [request.request_id])

    @override
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish requests, each group as a whole. Returns those that a client knows of."""
        if request_ids is not None and self._groups:
            given = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            groups = (self._groups.of(stream) for stream in given)
            request_ids = given.union(*(group.streams for group in groups if group is not None))
        finished = super().finish_requests(request_ids, finished_status)
        grammar_manager.cancel_compilations(finished)
        self._begun.forget(request.request_id for request in finished)
        followers = {r.request_id for r in finished if self._groups.is_follower(r.request_id)}
        for request in finished:
            self._forget(request.request_id)
        return [request for request in finished if request.request_id not in followers]

    def _forget(self, stream: str) -> None:
        group = self._groups.remove(stream)
        if group is not None:
            self._suffixes.remove(group.leader)
            self._probes.remove(group.leader)
            self._speculation.forget(group.leader)
        self._timelines.forget(stream if group is None else group.leader)

    # --- the outcome of a step --------------------------------------------------------------------

    @override
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Do vLLM's bookkeeping of a finished step.

        Followers are hidden from clients, and finished with their leaders.
        """
        failures = wire.failures_of(model_runner_output)
        if failures:
            outcome.drop_output(failures, model_runner_output)
            versions.chosen().fail_requests(self, failures)
        uncompiled = grammar_manager.uncompiled(self.requests, self.grammar_compile_error_reqs)
        outputs = self._update_groups(scheduler_output, model_runner_output)
        unmatched = grammar_manager.take_failures(self.structured_output_manager)
        outcome.tell_reasons({**uncompiled, **unmatched, **failures, **self._refused}, outputs)
        self._refused.clear()
        self._begun.tell(outcome.each(outputs))
        self._pace.sent(outputs)
        return outputs

    def _update_groups(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs]
        if not self._groups and not self._timelines:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            return outputs
        touched = list(self._scheduled_groups(scheduler_output))
        asked = {
            g.leader: StreamColumns(len(g.weights), g.logprobs)
            for g in touched
            if g.logprobs is not None
        }
        asked |= self._timelines.logprobs_asked(scheduler_output.num_scheduled_tokens)
        guidance = StepGuidance.of(scheduler_output)
        strengths = wire.strengths_of(model_runner_output)
        self._probes.hear(scheduler_output, guidance, model_runner_output, strengths)
        self._speculation.end(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._close(touched)
        self._timelines.forget_ended()
        events = outcome.follower_events(touched, outputs) if self._is_traced else {}
        outcome.hide({follower for group in touched for follower in group.followers}, outputs)
        outcome.fit_logprobs(guidance, outputs, asked)
        counts = wire.mark_guided_tokens(guidance, outcome.each(outputs), strengths)
        self._counts["guided_tokens"] += counts.tokens
        self._counts["full_strength_tokens"] += counts.full_strength
        self._counts["gate_closed_tokens"] += counts.gate_closed
        for output in outcome.each(outputs) if events else ():
            if output.request_id in events:
                wire.mark_follower_events(output, events[output.request_id])
        return outputs

    def _close(self, groups: list[Group]) -> None:
        """Finish the followers of finished leaders.

        A follower never finishes before its leader, because their `max_tokens` are equal.
        """
        for group in groups:
            if group.leader not in self.requests and group.leader in self._groups:
                super().finish_requests(group.followers, RequestStatus.FINISHED_ABORTED)
                self._forget(group.leader)

    @override
    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count accepted drafts as vLLM does. A group counts once."""
        if self._groups.is_follower(request_id):
            return spec_decoding_stats
        self._speculation.observe(request_id, num_draft_tokens, num_accepted_tokens)
        counted: SpecDecodingStats | None = super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )
        return counted

    # --- statistics and checks --------------------------------------------------------------------

    def guidance_stats(self) -> dict[str, int]:
        """Counters since the start, and the current state of queues, groups and KV blocks."""
        return {
            **stats.queues(self),
            "held_ms": int(1000 * self._pace.held_s),
            "groups": len(self._groups),
            "guided_streams": sum(len(group.streams) for group in self._groups),
            "held_streams": sum(stream in self.requests for stream in self._held),
            **self._counts,
            **self._probes.counts,
            **self._speculation.stats(),
            **stats.blocks(self, self._groups, self._roles),
        }

    def check_integrity(self) -> None:
        """Assert what must hold between steps. For tests.

        All streams of a group have the same output tokens (ARCHITECTURE.md, "What must hold");
        `output_of_followers` says which of them a follower has.
        """
        self._groups.check_integrity()
        for group in self._groups:
            leader, *followers = (self.requests[stream] for stream in group.streams)
            output = list(leader.output_token_ids)
            since = self._timelines.since(group.leader)
            begun_at = len(begun.tokens_of(leader))
            opened_at = self._timelines.opened_at.get(group.leader, begun_at)
            before = output_of_followers(output[:opened_at], since)
            for follower in followers:
                prompt = list(follower.prompt_token_ids or ())
                assert prompt[len(prompt) - len(before) :] == before, group
                held = [*before, *follower.output_token_ids]
                assert held == output_of_followers(output, since), group
        self._speculation.check_integrity()
        leaders = [group.leader for group in self._groups]
        self._suffixes.check_integrity(leaders)
        self._probes.check_integrity(leaders)
        self._timelines.check_integrity()
