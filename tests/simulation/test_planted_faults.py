"""Faults that are planted in the policy and in the scheduler: the random loads catch each."""

import dataclasses

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cfg_core.params.timeline import Timeline
from cfg_core.policy import lockstep
from cfg_core.policy.groups import GroupTable
from cfg_core.policy.markers import Markers
from cfg_core.vllm_plugin import wire
from cfg_core.vllm_plugin.core import (
    begun,
    grammar_manager,
    group_scheduler,
    scheduler,
    scoring,
)
from cfg_core.vllm_plugin.core.begun import make_begun, tokens_of
from cfg_core.vllm_plugin.core.gates import Probes
from cfg_core.vllm_plugin.core.kv_roles import EvenSplit
from cfg_core.vllm_plugin.core.scheduler import GuidedAsyncScheduler, GuidedScheduler
from cfg_core.vllm_plugin.core.snapshot import SteadyStep
from cfg_core.vllm_plugin.core.suffixes import Suffixes
from cfg_core.vllm_plugin.core.timelines import Timelines
from cfg_core.vllm_plugin.wire import JointRow, StepGuidance, SuffixTokens
from cfg_core.vllm_plugin.worker import gates
from tests.simulation.loads import simulate
from tests.simulation.paths import PATHS

plan, make_followers, attach = lockstep.plan, group_scheduler.make_followers, wire.attach
guides, weights_at, advance = Timeline.guides, Timeline.weights_at, Timelines.advance
guidance_of, stays_steady = GuidedScheduler._guidance, GuidedScheduler._stays_steady
take_back, update_after_schedule = (
    GuidedScheduler._take_back,
    GuidedScheduler._update_after_schedule,
)
read_markers = Markers.read
plan_group, forget_suffixes = group_scheduler.plan_group, Suffixes.forget
hear, probe_row, strengths_of = Probes.hear, Probes.row, wire.strengths_of
kept_by_v1, take_back = gates.kept_by_v1, Probes._take_back
most_hits, reads_of = scoring.most_hits, scoring.reads_of
update_from_output, preempt_unit = GuidedScheduler.update_from_output, GuidedScheduler._preempt_unit


def _all(snapshot):
    return tuple(stream.id for unit in snapshot.running for stream in unit.streams)


def _take_back_at_once(self, request, num_drafts):
    request.num_computed_tokens -= 1 + num_drafts
    request.is_prefill_chunk, request.spec_token_ids = True, []


def _whatever_the_drafts(self, step, *more):
    drafts = step.scheduled_spec_decode_tokens
    step.scheduled_spec_decode_tokens = {}
    guidance = guidance_of(self, step, *more)
    step.scheduled_spec_decode_tokens = drafts
    return guidance


def _think_it_steady(self, step):
    guidance = StepGuidance.of(step)
    if guidance is not None and len(step.num_scheduled_tokens) == len(self.running):
        self._steady = SteadyStep(
            list(self.running), frozenset(step.num_scheduled_tokens), guidance
        )


def _think_scores_steady(self, step):
    guidance = StepGuidance.of(step)
    if guidance is not None and any(row.scoring for row in guidance.joint):
        scheduled = step.num_scheduled_tokens.keys()
        self._steady = SteadyStep.of(self.running, scheduled, guidance)


def _one_token_less(*args):
    made = make_followers(*args)
    for follower in made:
        follower.max_tokens -= follower.max_tokens > 1
    return made


def _without_solo(step, guidance):
    attach(step, dataclasses.replace(guidance, solo=()))


def _weights_exchanged(step, guidance):
    attach(
        step,
        StepGuidance(
            tuple(JointRow(r.group, r.weights[::-1]) for r in guidance.joint), guidance.solo
        ),
    )


def _without_last_follower(step, guidance):
    attach(step, _changed_rows(guidance, lambda names: names[:-1] if len(names) > 2 else names))


def _last_follower_twice(step, guidance):
    attach(step, _changed_rows(guidance, lambda names: (*names[:-1], names[1])))


def _changed_rows(guidance, change):
    rows = []
    for row in guidance.joint:
        leader, *followers = change(row.streams)
        group = row.group._replace(leader=leader, followers=tuple(followers))
        rows.append(row._replace(group=group))
    return dataclasses.replace(guidance, joint=tuple(rows))


def _without_output(leader, group_plan, *args):
    made = make_followers(leader, group_plan, *args)
    for follower, prompt in zip(made, group_plan.prompts, strict=True):
        del follower._all_token_ids[len(prompt.token_ids) :]
        del follower.prompt_token_ids[len(prompt.token_ids) :]
        follower.num_prompt_tokens = len(prompt.token_ids)
    return made


def _last_without_begun(leader, group_plan, *args):
    made = make_followers(leader, group_plan, *args)
    follower, prompt = made[-1], group_plan.prompts[-1]
    if tokens_of(leader):
        del follower._all_token_ids[len(prompt.token_ids) :]
        del follower.prompt_token_ids[len(prompt.token_ids) :]
        follower.num_prompt_tokens = len(prompt.token_ids)
    return made


def _last_begun_twice(request):
    before = request.num_output_tokens
    make_begun(request)
    if request.num_output_tokens > before:
        request.append_output_token_ids(request.output_token_ids[-1])


def _without_others(changes):
    changes.others = False
    return changes


def _restart_late(self, output):
    before = max(self.since, vars(self).pop("late", 0))
    read_markers(self, output)
    if self.since != before and self.since == len(output):
        self.late, self.since = self.since, before
    else:
        self.since = max(self.since, before)


def _read_samples_taken_back(self, request, num_drafts):
    """The conditional stream alone may sample another token than the group, such as a marker."""
    take_back(self, request, num_drafts)
    markers = self._timelines._markers.get(request.request_id)
    if markers is not None:
        ends = markers._between.start_token_id, markers._between.end_token_id
        read_markers(markers, [*request.output_token_ids, ends[markers.is_inside]])


def _free_blocks_only(self, group_plan):
    for stream in group_plan.group.followers:
        self.kv_cache_manager.free(self.requests[stream])
    self._groups.remove(group_plan.group.leader)


def _suffixes_one_token_short(step, guidance):
    short = tuple(SuffixTokens(leader, tokens[:-1]) for leader, tokens in guidance.suffixes)
    attach(step, dataclasses.replace(guidance, suffixes=short))


def _plan_one_token_short(*args):
    made = plan_group(*args)
    short = made.group._replace(suffix=made.group.suffix[:-1])
    return dataclasses.replace(made, group=short if short.suffix else made.group)


def _place_without_own_tokens(self, held, alone):
    for leader, group in self._groups.items():
        self._requests[leader].spec_token_ids = list(group.suffix)


def _forget_a_block_too_many(self, taken):
    forget_suffixes(self, taken)
    for leader, _ in taken:
        request = self._requests[leader]
        request.num_computed_tokens -= min(16, request.num_computed_tokens)


def _strengths_of_others(output):
    found = strengths_of(output)
    return dict(zip(found, [*found.values()][::-1], strict=True))


def _take_back_computed(self, request, tokens):
    request.num_computed_tokens -= tokens * (request.status == RequestStatus.RUNNING)


def _take_back_one(self, request, tokens):
    take_back(self, request, 1)


def _keep_all(step, names, first_row, strengths, blind):
    return gates.Kept({}, first_row)


def _keep_none(step, names, first_row, strengths, blind):
    return gates.Kept(dict.fromkeys(gates.probe_places(step, names), 0), first_row)


def _keep_no_draft(step, names, first_row, strengths, blind):
    found = kept_by_v1(step, names, first_row, strengths, blind)
    return gates.Kept({place: min(count, 1) for place, count in found.counts.items()}, first_row)


def _hear_all_as_saved(self, step, guidance, output, strengths):
    hear(self, step, guidance, output, strengths)
    for row in guidance.joint if guidance is not None else ():
        self.counts["gate_saved_tokens"] += len(row.suffix)


def _remove_the_leader_alone(self, stream):
    group = self._by_stream.pop(stream, None)
    if group is not None:
        self._leaders.pop(group.leader, None)
    return group


FAULTS = {
    # in the policy
    "no group ever samples": (
        lockstep,
        "plan",
        lambda *a: dataclasses.replace(plan(*a), sampling=frozenset()),
    ),
    "a stream is dropped from the order": (
        lockstep,
        "plan",
        lambda *a: dataclasses.replace(
            p := plan(*a), order=p.order[:-1] if len(p.order) > 3 else p.order
        ),
    ),
    "preempted units stay in the order": (
        lockstep,
        "plan",
        lambda s, n: dataclasses.replace(plan(s, n), order=_all(s)),
    ),
    "no unit is ever preempted": (
        lockstep,
        "plan",
        lambda s, n: dataclasses.replace(plan(s, n), preempt=(), order=_all(s)),
    ),
    # in the scheduler
    "a solo sample is treated as steady": (
        GuidedScheduler,
        "_update_after_schedule",
        lambda self, step: [update_after_schedule(self, step), _think_it_steady(self, step)][0],
    ),
    "a solo sample is not taken back": (
        GuidedScheduler,
        "_take_back",
        lambda self, request, num_drafts: None,
    ),
    "drafts of a solo stream are kept": (
        GuidedScheduler,
        "_take_back",
        lambda self, request, num_drafts: take_back(self, request, 0),
    ),
    "groups with unequal drafts count as joint": (
        GuidedScheduler,
        "_guidance",
        _whatever_the_drafts,
    ),
    "a solo sample keeps its placeholder": (
        GuidedAsyncScheduler,
        "_take_back",
        GuidedScheduler._take_back,
    ),
    "a solo stream runs again before the pipeline has its sample": (
        GuidedScheduler,
        "_take_back",
        _take_back_at_once,
    ),
    "solo rows are not detected": (
        GuidedScheduler,
        "_samples",
        lambda self, stream, step: stream in step.num_scheduled_tokens,
    ),
    "the worker gets no solo rows": (wire, "attach", _without_solo),
    "the worker gets no joint groups": (wire, "attach", lambda step, guidance: None),
    "weights are exchanged": (wire, "attach", _weights_exchanged),
    "streams come back while output is in flight": (
        GuidedScheduler,
        "_handle_blocked_waiting_request",
        Scheduler._handle_blocked_waiting_request,
    ),
    "followers outlive their leader": (GuidedScheduler, "_close", lambda self, groups: None),
    "followers end before their leader": (group_scheduler, "make_followers", _one_token_less),
    "clients see followers": (
        GuidedScheduler,
        "update_from_output",
        lambda self, *a: (
            Scheduler.update_from_output(self, *a),
            self._close(list(self._groups)),
        )[0],
    ),
    "an abort ends one stream only": (
        GuidedScheduler,
        "finish_requests",
        Scheduler.finish_requests,
    ),
    "one follower is missing": (wire, "attach", _without_last_follower),
    "a follower is blended twice": (wire, "attach", _last_follower_twice),
    "a window opens a token late": (
        Timeline,
        "guides",
        lambda self, token: guides(self, token) and (token > self.start or token == 0),
    ),
    "a window closes a token late": (
        Timeline,
        "guides",
        lambda self, token: guides(self, token) or (token > 0 and guides(self, token - 1)),
    ),
    "a window never closes": (Timeline, "guides", lambda self, token: self.start <= token),
    "a scale changes a token late": (
        Timeline,
        "weights_at",
        lambda self, token: weights_at(self, max(0, token - 1)),
    ),
    "a marker is read a token late": (
        Markers,
        "read",
        lambda self, output: read_markers(self, output[: max(self._read, len(output) - 1)]),
    ),
    "the negative begins anew a token late": (Markers, "read", _restart_late),
    "the negative keeps the start token": (
        group_scheduler,
        "make_followers",
        lambda leader, plan, traced, since: make_followers(leader, plan, traced, max(0, since - 1)),
    ),
    "markers are not read in the prompt": (
        Timelines,
        "guides_first",
        lambda self, plan: self._markers.pop(plan.group.leader, None) is None,
    ),
    "markers are read on a sample that is taken back": (
        GuidedScheduler,
        "_take_back",
        _read_samples_taken_back,
    ),
    "drafts reach over a marker": (Markers, "unmarked", lambda self, drafts: len(drafts)),
    "drafts reach over a change": (Timelines, "_cut_drafts", lambda self, *args: None),
    "uncertain drafts are not awaited": (Timelines, "_is_certain", lambda self, *args: True),
    "followers forget what was generated before": (
        group_scheduler,
        "make_followers",
        _without_output,
    ),
    "one follower lacks the begun tokens": (
        group_scheduler,
        "make_followers",
        _last_without_begun,
    ),
    "a begun token is counted twice": (begun, "make_begun", _last_begun_twice),
    "begun tokens are not sent": (begun.BegunRequests, "tell", lambda self, outputs: None),
    "the workers do not get the begun tokens": (
        begun.BegunRequests,
        "complete",
        lambda self, *args: None,
    ),
    "a grammar is not advanced over the begun tokens": (
        grammar_manager,
        "catch_up",
        lambda *args: True,
    ),
    "freed blocks are still written": (GuidedScheduler, "_end_window", _free_blocks_only),
    "followers stay behind the window": (
        GuidedScheduler,
        "_end_window",
        lambda self, plan: self._groups.remove(plan.group.leader),
    ),
    "steps stay steady over a change": (
        Timelines,
        "advance",
        lambda self, *known: _without_others(advance(self, *known)),
    ),
    "cached blocks reach into the scored tokens": (scoring, "most_hits", lambda *args: None),
    "cached blocks reach one token too far": (
        scoring,
        "most_hits",
        lambda *args: None if (most := most_hits(*args)) is None else most + 1,
    ),
    "no group is scored": (scheduler, "scoring_of", lambda *args: None),
    "steps that score are steady": (
        GuidedScheduler,
        "_update_after_schedule",
        lambda self, step: [update_after_schedule(self, step), _think_scores_steady(self, step)][0],
    ),
    "the last scored row is not kept": (
        scheduler,
        "reads_of",
        lambda *args: [dataclasses.replace(r, count=max(1, r.count - 1)) for r in reads_of(*args)],
    ),
    "rows are kept from the wrong place": (
        scheduler,
        "reads_of",
        lambda *args: [dataclasses.replace(r, skip=max(0, r.skip - 1)) for r in reads_of(*args)],
    ),
    "the worker gets suffixes that are one token short": (
        wire,
        "attach",
        _suffixes_one_token_short,
    ),
    "suffixes are one token short": (group_scheduler, "plan_group", _plan_one_token_short),
    "a row without its suffix is joint": (scheduler, "is_complete", lambda group, computed: True),
    "suffixes follow tokens that are in flight": (Suffixes, "place", _place_without_own_tokens),
    "suffixes stay in the text": (Suffixes, "forget", lambda self, taken: None),
    "a shared block is written again": (Suffixes, "forget", _forget_a_block_too_many),
    "suffixes outlive their window": (Suffixes, "remove", lambda self, leader: None),
    "the gate is that of another row": (wire, "strengths_of", _strengths_of_others),
    "V1 samples probes whose gate is open": (gates, "kept_by_v1", _keep_all),
    "V1 keeps drafts behind an open gate": (gates.Kept, "cut", lambda *args: None),
    "V1 drops drafts in front of an open gate": (gates, "kept_by_v1", _keep_no_draft),
    "V2 samples probes whose gate is open": (gates, "drop_open", lambda *args: None),
    "a probe is dropped although its gate is closed": (
        gates,
        "kept_by_v1",
        _keep_none,
    ),
    "a blind probe is taken for one that sees": (
        gates,
        "blind_places",
        lambda *args: [],
    ),
    "a probe that sees is taken for blind": (
        gates,
        "blind_places",
        lambda step, names, *args: gates.probe_places(step, names),
    ),
    "an open probe is not taken back": (Probes, "_take_back", lambda *args: None),
    "an open probe's drafts are not taken back": (Probes, "_take_back", _take_back_one),
    "an open probe keeps its placeholder": (Probes, "_take_back", _take_back_computed),
    "a leader goes on behind an open probe": (Probes, "held", frozenset()),
    "a leader has its suffix behind a probe in flight": (
        Probes,
        "coming",
        lambda self, num_running: self._gates.to_probe(1.0) - self._in_flight.keys(),
    ),
    "a joint step counts as a probe": (
        Probes,
        "row",
        lambda self, group, computed: probe_row(self, group, ()),
    ),
    "suffixes that were computed count as saved": (Probes, "hear", _hear_all_as_saved),
    "half a group is preempted": (
        GuidedScheduler,
        "_preempt_unit",
        lambda self, unit: preempt_unit(self, dataclasses.replace(unit, streams=unit.streams[:1])),
    ),
    "half a group is forgotten": (GroupTable, "remove", _remove_the_leader_alone),
    "the even split is not enforced": (EvenSplit, "enforce", lambda self, manager: None),
}


LOADS = {(path.name, seed): path for seed in range(40) for path in PATHS}
SEEN_BY = {
    "a grammar is not advanced over the begun tokens": ("v1", 1),
    "a leader has its suffix behind a probe in flight": ("v1-async", 3),
    "a stream is dropped from the order": ("v1", 1),
    "a window closes a token late": ("v1-drafts3", 1),
    "a window never closes": ("v1-drafts3", 1),
    "cached blocks reach one token too far": ("v1-async-states-align", 25),
    "drafts of a solo stream are kept": ("v1-drafts3", 1),
    "groups with unequal drafts count as joint": ("v1-drafts3", 1),
    "half a group is preempted": ("v2-async-pp4", 1),
    "markers are read on a sample that is taken back": ("v1-async", 6),
    "one follower is missing": ("v1", 1),
    "the even split is not enforced": ("v1", 6),
    "the gate is that of another row": ("v1", 1),
}
"""A load that catches a fault which most loads do not, so that it is played first."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(model_folder, monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    first = [SEEN_BY[fault]] if fault in SEEN_BY else []
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError, ValueError)):  # noqa: PT012
        for name, seed in [*first, *LOADS]:
            simulate(model_folder, LOADS[name, seed], seed)
