"""Closed gates (`guidance_min_entropy`) save the rows of a suffix: see cfg_core/policy/gates.py.

In a *probe* a leader runs without its suffix, and is a row of the step as a joint group is
(`JointRow.probe`). The worker computes the entropy of that row. Where it opens the gate, the worker
drops the sample, and the scheduler learns it from the strength that comes with the step's output:
only then the token is taken back.

With async scheduling the next step is scheduled before that. If the gate has opened, it has no
token to begin with:

- V2 counts on the device. The next step computes the same position again, whether it is a probe,
  which finds the gate open again, or a joint step, which gives the token. The host takes each probe
  back when it hears of it.
- On V1 the host says which position a step computes. Behind a probe there is only another one: the
  worker drops it as well (worker/gates.py), and what it writes behind the text is overwritten. Then
  the leader is held until no probe is in flight.

With speculation a probe verifies drafts, too, each by the row in front of it. The first open gate
ends the run of drafts, as a rejected draft does; only if it is that of the first row is the probe
taken back. Then V1 counts tokens of steps in flight on the device, by what was sampled, so it
probes only where no step is scheduled in advance.

Groups that a probe could not serve run joint always: those that show the log-probabilities of the
negative. So do all groups in a pipeline, in which a take-back reaches the first stages late. With
speculation, so do texts with a seed: they depend on which steps have drafts, and whether a gate is
probed depends on the time that steps take.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.request import RequestStatus

from cfg_core.policy.gates import Gates
from cfg_core.policy.groups import Group
from cfg_core.policy.token_cost import TokenCost
from cfg_core.vllm_plugin.core.speculation import is_seeded
from cfg_core.vllm_plugin.wire import DROPPED, JointRow, StepGuidance, num_sampled

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

PROBE_WEIGHTS = (1.0, 0.0)
"""The leader is both streams of its own blend, which is then its own row."""


def lost_steps(asynchronous: bool, holds: bool) -> int:
    """Steps that an open probe costs its request: its own, and those that did not know of it."""
    return 1 + asynchronous + (asynchronous and holds)


class Probes:
    """The probes of one engine.

    saves: whether gates are probed at all.
    asynchronous: whether a step is scheduled while another one runs.
    holds: whether a leader whose gate has opened waits until no probe is in flight.
    drafts: whether the engine has speculation.
    cost: what one more token costs a step.
    counts: probes since the start, and the tokens of suffixes that closed ones have saved.
    """

    def __init__(
        self,
        requests: Mapping[str, Request],
        saves: bool,
        asynchronous: bool,
        holds: bool,
        drafts: bool = False,
    ) -> None:
        self._requests, self._drafts = requests, drafts
        self._holds = asynchronous and holds
        self.saves = saves and not (drafts and self._holds)
        self._gates = Gates(lost_steps(asynchronous, holds))
        self._in_flight: Counter[str] = Counter()
        self.cost = TokenCost()
        self.counts = {"gate_probes": 0, "gate_saved_tokens": 0}

    def add(self, group: Group) -> None:
        """Note a group that begins, if it can be probed."""
        strength = group.strength
        has_gate = strength is not None and (strength.min_entropy or 0.0) > 0
        depends = self._drafts and is_seeded(self._requests[group.leader])
        if self.saves and group.suffix and has_gate and group.logprobs is None and not depends:
            self._gates.add(group.leader, len(group.suffix))

    def remove(self, leader: str) -> None:
        """Note that a group ends."""
        self._gates.remove(leader)
        del self._in_flight[leader]

    def __contains__(self, leader: object) -> bool:
        """Whether the gate of a group can be probed."""
        return leader in self._gates

    @property
    def in_flight(self) -> Collection[str]:
        """The leaders of which nobody knows yet whether their last steps had a token."""
        return self._in_flight.keys()

    @property
    def held(self) -> frozenset[str]:
        """The leaders that must not be scheduled."""
        if not self._holds:
            return frozenset()
        return frozenset(one for one in self._in_flight if not self._gates.is_closed(one))

    def coming(self, num_running: int) -> Collection[str]:
        """The leaders that run without their suffix in the coming step, if they run.

        num_running: the requests that wait for the step. All of them gain by what it need not
            compute.
        """
        if not self._gates:
            return ()
        probed = self._gates.to_probe(num_running * self.cost.of_a_token)
        return probed | self._in_flight.keys() if self._holds else probed

    def row(self, group: Group, computed: tuple[int, ...]) -> JointRow | None:
        """The probe of a leader that samples with so much of its suffix; None if it is none."""
        if computed or group.leader not in self._gates:
            return None
        return JointRow(group, PROBE_WEIGHTS, probe=True)

    def scheduled(self, step: SchedulerOutput, guidance: StepGuidance) -> None:
        """Note the probes of a step that was scheduled, and when that was."""
        if not self._gates:
            return
        probed = [row.streams[0] for row in guidance.joint if row.probe]
        self._in_flight.update(probed)
        self.counts["gate_probes"] += len(probed)
        tokens = step.total_num_scheduled_tokens
        behind = sum(len(suffix.tokens) for suffix in guidance.suffixes)
        behind += sum(map(len, step.scheduled_spec_decode_tokens.values()))
        if tokens == len(step.num_scheduled_tokens) + behind:
            self.cost.begin(step, tokens, time.monotonic())

    def hear(
        self,
        step: SchedulerOutput,
        guidance: StepGuidance | None,
        output: ModelRunnerOutput,
        strengths: Mapping[str, np.ndarray],
    ) -> None:
        """Learn from a step's output which gates are open, and take back the tokens of open probes.

        Call it before vLLM reads the output. A leader that was preempted since has no token that
        could be taken back.

        strengths: [2, rows] of each leader with a gate.
        """
        if not self._gates:
            return
        self.cost.end(step, time.monotonic())
        for row in guidance.joint if guidance is not None else ():
            leader = row.streams[0]
            if leader in self._gates and leader in strengths:
                own = strengths[leader][0]
                if row.probe:
                    self._hear_of_probe(leader, own, num_sampled(output, leader))
                else:
                    self._gates.saw(leader, bool(own[0] > 0))

    def _hear_of_probe(self, leader: str, strengths: np.ndarray, kept: int) -> None:
        """strengths: [1 + drafts]. kept: how many tokens came of them, all behind closed gates."""
        self._in_flight[leader] -= 1
        if not self._in_flight[leader]:
            del self._in_flight[leader]
        for _ in range(kept):
            self._gates.saw(leader, is_open=False)
        self.counts["gate_saved_tokens"] += kept * self._gates.tokens(leader)
        if kept < len(strengths) and strengths[kept] == DROPPED:
            self._gates.saw(leader, is_open=True)
        if not kept:
            self._take_back(self._requests[leader], len(strengths))

    def _take_back(self, request: Request, tokens: int) -> None:
        """Count the last tokens as not computed. Their step has ended, so they may run at once."""
        if request.status == RequestStatus.RUNNING:
            request.num_computed_tokens -= tokens
            if request.num_output_placeholders:  # with async scheduling
                request.num_output_placeholders -= tokens

    def check_integrity(self, leaders: Collection[str]) -> None:
        """Assert what must hold between steps. For tests. leaders: of the live groups."""
        assert self._in_flight.keys() <= set(self._gates) <= set(leaders)
        assert all(count > 0 for count in self._in_flight.values())
