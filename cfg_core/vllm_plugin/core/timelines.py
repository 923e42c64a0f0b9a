"""Groups whose guidance changes along the text: windows, schedules and markers, step by step.

Outside of its window, a request is plain: it has no followers, no slot and no block for them, and
is in no group. When its next token is the window's first, its leader waits until all its tokens are
known. Then the followers are made, with these tokens in their prompts. When its next token is the
first behind the window, the followers are freed.

A step never reaches over a change. Drafts are cut so that they end before it. If drafts in flight
may reach the change, the streams wait until it is known which were accepted. So the change comes
between two tokens, whatever the steps are.

Markers are windows that tokens of the text open and close. Any token may be one, so such a request
is scheduled only when all its tokens are known. Drafts that are known are cut before a marker, and
others are not verified. Where `restart_negative` is set, the followers of an open group are freed
at a start token, and made anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cfg_core.params.timeline import Timeline
from cfg_core.policy.groups import GroupTable
from cfg_core.policy.markers import Markers
from cfg_core.vllm_plugin.core.followers import GroupPlan
from cfg_core.vllm_plugin.wire import StreamColumns

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Changes:
    """What is different in the coming step.

    opening, closing: groups whose followers must be made now, and those whose followers must end.
    held: streams that must not be scheduled.
    others: whether anything else differs from the last step.
    """

    opening: list[GroupPlan] = field(default_factory=list)
    closing: list[GroupPlan] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    others: bool = False

    def __bool__(self) -> bool:
        return bool(self.opening or self.closing or self.others)


class Timelines:
    """The requests of one engine whose guidance changes.

    drafts: most drafts of a step; 0 without speculation.
    held: streams that must not be scheduled in the coming step.
    opened_at: the output tokens that each leader had when its followers were made.

    `_since` has, of those that read markers, since which token the followers have the output.
    """

    def __init__(
        self, groups: GroupTable, requests: Mapping[str, Request], drafts: int = 0
    ) -> None:
        self._groups, self._requests, self._drafts = groups, requests, drafts
        self._plans: dict[str, GroupPlan] = {}
        self._over: dict[str, GroupPlan] = {}
        self._weights: dict[str, tuple[float, ...]] = {}
        self._markers: dict[str, Markers] = {}
        self._since: dict[str, int] = {}
        self.opened_at: dict[str, int] = {}
        self.held: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Whether any request is watched, or was guided before."""
        return bool(self._plans or self._over)

    def __contains__(self, leader: str) -> bool:
        """Whether a request is watched."""
        return leader in self._plans

    def add(self, plan: GroupPlan) -> None:
        """Begin to watch a request that has just come."""
        leader, timeline = plan.group.leader, plan.timeline
        self._plans[leader] = plan
        if timeline is not None and timeline.between is not None:
            self._markers[leader] = Markers(timeline.between, plan.is_open)

    def guides_first(self, plan: GroupPlan) -> bool:
        """Whether the next token of a request that was added is guided.

        It is the first one, unless the request has begun elsewhere (begun.py).
        """
        request = self._requests[plan.group.leader]
        if (markers := self._markers.get(plan.group.leader)) is not None:
            markers.read(request.output_token_ids)
        return self._guides(plan, request.num_output_tokens)

    def _guides(self, plan: GroupPlan, token: int) -> bool:
        """Whether the next token, of this number, is guided."""
        markers = self._markers.get(plan.group.leader)
        assert plan.timeline is not None
        return plan.timeline.guides(token) and (markers is None or markers.is_inside)

    def open(self, plan: GroupPlan) -> None:
        """Note that the followers of a group are made now."""
        leader, timeline = plan.group.leader, plan.timeline
        assert timeline is not None
        self.opened_at[leader] = token = self._requests[leader].num_output_tokens
        self._weights[leader] = timeline.weights_at(token)
        if leader in self._markers:
            self._since[leader] = self._markers[leader].since

    def since(self, leader: str) -> int:
        """Since which token the followers of a group have the output (`output_of_followers`)."""
        return self._since.get(leader, 0)

    def forget(self, leader: str) -> None:
        """Stop watching a request that has ended."""
        self._plans.pop(leader, None)
        self._over.pop(leader, None)
        self._markers.pop(leader, None)
        self.close(leader)

    def close(self, leader: str) -> None:
        """Note that the followers of a group end."""
        self._weights.pop(leader, None)
        self._since.pop(leader, None)
        self.opened_at.pop(leader, None)

    def forget_ended(self) -> None:
        """Stop watching requests that the scheduler no longer has."""
        for leader in [*self._plans, *self._over]:
            if leader not in self._requests:
                self.forget(leader)

    def weights(self, leader: str) -> tuple[float, ...] | None:
        """The weights for the next token of a group that is watched; None for another group."""
        return self._weights.get(leader)

    def logprobs_asked(self, leaders: Iterable[str]) -> dict[str, StreamColumns]:
        """The columns of each of these requests that asks for its streams' logprobs."""
        asked = {}
        for leader in leaders:
            plan = self._plans.get(leader) or self._over.get(leader)
            if plan is not None and plan.group.logprobs is not None:
                asked[leader] = StreamColumns(len(plan.group.weights), plan.group.logprobs)
        return asked

    def step_back(self, leader: str) -> None:
        """Watch a request again: its output in flight is dropped, which may reopen its window."""
        if leader in self._over:
            self._plans[leader] = self._over.pop(leader)

    # --- before each step -------------------------------------------------------------------------

    def advance(self, unknown: Collection[str] = ()) -> Changes:
        """Look at each request's next token.

        `held` and `weights` are of the coming step afterwards.

        unknown: leaders of which nobody knows yet whether their last step had a token (gates.py).
        """
        changes = Changes()
        for plan in list(self._plans.values()):
            self._look_at(plan, changes, plan.group.leader in unknown)
        for stream in changes.held:
            self._requests[stream].spec_token_ids = []
        changes.others |= bool(changes.held or self.held)
        self.held = frozenset(changes.held)
        return changes

    def _look_at(self, plan: GroupPlan, changes: Changes, is_unknown: bool) -> None:
        leader, timeline = plan.group.leader, plan.timeline
        request, is_open = self._requests[leader], leader in self._groups
        assert timeline is not None
        if request.num_stale_output_tokens:
            return  # it is not resumed before these have come
        streams = plan.group.streams if is_open else (leader,)
        if not self._is_certain(request, timeline, is_unknown):
            changes.held += streams
            return
        token = request.num_output_tokens + request.num_output_placeholders
        markers = self._markers.get(leader)
        if markers is not None:
            markers.read(request.output_token_ids)
        self._cut_drafts(streams, timeline, token)
        if not self._guides(plan, token):
            if is_open:
                changes.closing.append(plan)
            if timeline.is_over(token):
                self._over[leader] = self._plans.pop(leader)
        elif is_open and markers is not None and markers.since != self.since(leader):
            changes.closing.append(plan)
            changes.opening.append(plan)
        elif is_open:
            changes.others |= self._set_weights(leader, timeline.weights_at(token))
        elif request.num_output_placeholders:
            changes.held.append(leader)
        else:
            changes.opening.append(plan)

    def _is_certain(self, request: Request, timeline: Timeline, is_unknown: bool) -> bool:
        """Whether the same rules apply to the next token however many drafts are accepted.

        The drafts are those in flight and those of the coming step. Tokens in flight may not exist
        either if `is_unknown`.
        """
        in_flight = request.num_output_placeholders
        if in_flight and timeline.between is not None:
            return False  # any of them may be a marker
        if not in_flight or not (self._drafts or is_unknown):
            return True
        # The last of the tokens in flight may be a rejected draft, or an open probe's.
        change = timeline.next_change(request.num_output_tokens)
        return change is None or request.num_output_tokens + in_flight + self._drafts < change

    def _set_weights(self, leader: str, weights: tuple[float, ...]) -> bool:
        """Note the weights of the coming step. Returns whether they are others than before."""
        changed = self._weights.get(leader) != weights
        self._weights[leader] = weights
        return changed

    def _cut_drafts(self, streams: Sequence[str], timeline: Timeline, token: int) -> None:
        """Keep only drafts before the next change. The token after the drafts is before it, too."""
        if not self._drafts:
            return
        change = timeline.next_change(token)
        most = self._drafts if change is None else change - token - 1
        for request in (self._requests[stream] for stream in streams):
            kept = min(most, self._unmarked(streams[0], request.spec_token_ids))
            if len(request.spec_token_ids) > kept:
                request.spec_token_ids = request.spec_token_ids[:kept]

    def _unmarked(self, leader: str, drafts: Sequence[int]) -> int:
        """How many of these drafts come before one that may be a marker."""
        markers = self._markers.get(leader)
        return len(drafts) if markers is None else markers.unmarked(drafts)

    def check_integrity(self) -> None:
        """Assert what must hold between steps. For tests."""
        assert not self._plans.keys() & self._over.keys()
        watched = self._plans.keys() | self._over.keys()
        assert self._weights.keys() <= watched
        assert self._since.keys() <= self._markers.keys() <= watched
        assert self.opened_at.keys() <= self._plans.keys()
        for leader, plan in self._over.items():
            assert leader not in self._groups, plan
