"""Speculation as the scheduler sees it: the number of drafts of each group, and statistics."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from cfg_core.policy.draft_cost import DraftCosts
from cfg_core.policy.draft_length import DRAFT_COST, DraftLength, never_pays
from cfg_core.policy.groups import GroupTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Speculation:
    """Drafts of one engine's groups.

    most: maximum number of drafts in a step; 0 without speculation.
    cost: of one more draft (see `DraftLength`); with 0, groups never back off. None: it is measured
        (policy/draft_cost.py).
    may_rest: whether the drafter may skip a step (drafters.must_make_all). If not, nothing is
        measured either, because no step is without drafts.
    for_groups: whether groups get drafts. If not, only plain requests do. Groups with a suffix get
        none in any case, but for these:
    probes: the leaders whose gates can be probed (gates.py).
    """

    def __init__(
        self,
        groups: GroupTable,
        requests: Mapping[str, Request],
        most: int,
        cost: float | None,
        may_rest: bool = True,
        for_groups: bool = True,
        probes: Container[str] = (),
    ) -> None:
        self._groups, self._requests, self._most = groups, requests, most
        self._probes = probes
        self._for_groups = for_groups
        measures = cost is None and may_rest and for_groups and most > 0
        self._known = known = DRAFT_COST if cost is None else cost
        self.costs = DraftCosts(None if measures else known)
        self.clock = time.monotonic
        self._may_rest = may_rest
        self._none_ever = not for_groups or never_pays(most, known)
        self._lengths: dict[str, DraftLength] = {}
        self._planned: dict[str, int] = {}
        self._counts = {
            "guided": SpecDecodingStats.new(most),
            "plain": SpecDecodingStats.new(most),
        }

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Note how many drafts of a plain request or a leader were verified and accepted."""
        guided = request_id in self._groups
        self._counts["guided" if guided else "plain"].observe_draft(drafted, accepted)
        if guided:
            self._length(request_id).observe(drafted, accepted)

    def plan(self, leaders: Iterable[str], step: SchedulerOutput, is_measured: bool) -> int:
        """Decide how many drafts each of these groups verifies next. Returns the largest number.

        A drafter that is not for groups need not know that they use none: it makes all drafts.

        is_measured: see `measures`.
        """
        if not self._for_groups:
            return self._most
        rows = len(step.num_scheduled_tokens)
        played = self.costs.trial_move(rows) if is_measured and _decodes(step) else None
        cost = self.costs.of(rows)
        for leader in leaders:
            own = self._known if is_seeded(self._requests[leader]) else cost
            self._planned[leader] = self._next_length(leader, played, own)
        return max((self._planned[leader] for leader in leaders), default=0)

    def measures(self, leaders: Iterable[str]) -> bool:
        """Whether a step tells what drafts cost, in which these groups are, and nothing else.

        Suffixes are in the place of drafts. And a text with a seed must not depend on how long
        steps take, so that it is the same again if nothing runs beside it.
        """
        return not any(self._has_suffix(one) or is_seeded(self._requests[one]) for one in leaders)

    def _next_length(self, leader: str, played: bool | None, cost: float) -> int:
        if self._suffix_only(leader):
            return 0
        if played is not None:
            return self._most if played else 0
        return self._length(leader).next(self._most, cost)

    def begin(self, step: SchedulerOutput) -> None:
        """Note a step that was scheduled, and is measured (`measures`)."""
        if _decodes(step):
            made, rows = step.num_spec_tokens_to_schedule, len(step.num_scheduled_tokens)
            self.costs.begin(step, rows, made, _drafts(step))

    def end(self, step: SchedulerOutput) -> None:
        """Note that a step has ended."""
        self.costs.end(step, self.clock())

    def even_out(self, leader: str, members: Sequence[Request], max_model_len: int) -> None:
        """Give all streams of a group the same number of drafts, as they verify the same tokens.

        The number is the smallest of three: what the stream with the fewest drafts has, what the
        longest stream has room for, and what was planned.
        """
        room = max_model_len - 2 - max(r.num_computed_tokens for r in members)
        planned = self._planned.get(leader, self._most) if self._for_groups else 0
        fewest = max(0, min(room, planned, *(len(r.spec_token_ids) for r in members)))
        for request in members:
            if len(request.spec_token_ids) > fewest:
                request.spec_token_ids = request.spec_token_ids[:fewest]

    def rests(
        self, num_scheduled_tokens: Mapping[str, int], suffixes: Mapping[str, Sequence[int]]
    ) -> bool:
        """Whether the drafter may skip a step.

        It may if only groups decode in the step, and none of them will ever have a draft. It must
        read prompts, because their blocks are cached, and plain requests that reuse these blocks do
        have drafts.

        suffixes: the tokens of suffixes that leaders compute in the step, among the others.
        """
        return self._may_rest and all(
            n == 1 + len(suffixes.get(stream, ())) and self._has_none_ever(stream)
            for stream, n in num_scheduled_tokens.items()
        )

    def _has_none_ever(self, stream: str) -> bool:
        """Whether a stream is of a group that has no draft as long as it lives."""
        return stream in self._groups and (self._none_ever or self._suffix_only(stream))

    def _has_suffix(self, stream: str) -> bool:
        group = self._groups.of(stream)
        return group is not None and bool(group.suffix)

    def _suffix_only(self, stream: str) -> bool:
        """Whether a suffix takes the place of drafts behind this stream in all its steps.

        Each draft would need the suffix behind it, and there is one such place in a step. A probe
        has no suffix.
        """
        return self._has_suffix(stream) and stream not in self._probes

    def forget(self, leader: str) -> None:
        """Drop the state of a group that has ended."""
        self._lengths.pop(leader, None)
        self._planned.pop(leader, None)

    def _length(self, leader: str) -> DraftLength:
        return self._lengths.setdefault(leader, DraftLength())

    def stats(self) -> dict[str, int]:
        """Counters since the start, such as `guided_drafts_accepted_at_0`, and measured costs.

        `draft_cost_milli_from_8` is the cost of one more draft in steps of 8 to 15 rows, in
        thousandths of a step without drafts.
        """
        found = {
            f"draft_cost_milli_from_{rows}": round(1000 * cost)
            for rows, cost in self.costs.measured.items()
        }
        for kind, counts in self._counts.items() if self._most else ():
            found[f"{kind}_draft_steps"] = counts.num_drafts
            found[f"{kind}_drafts"] = counts.num_draft_tokens
            found[f"{kind}_drafts_accepted"] = counts.num_accepted_tokens
            for i in range(self._most):
                found[f"{kind}_drafts_at_{i}"] = counts.num_draft_tokens_per_pos[i]
                found[f"{kind}_drafts_accepted_at_{i}"] = counts.num_accepted_tokens_per_pos[i]
        return found

    def check_integrity(self) -> None:
        """Assert what must hold between steps. For tests."""
        leaders = {group.leader for group in self._groups}
        assert self._lengths.keys() | self._planned.keys() <= leaders


def is_seeded(request: Request) -> bool:
    """Whether the text of a request is drawn, and must be the same again with its seed."""
    params = request.sampling_params
    return params is not None and params.seed is not None and params.temperature > 0


def _drafts(step: SchedulerOutput) -> int:
    """Drafts that a step verifies, of all streams together."""
    return sum(map(len, step.scheduled_spec_decode_tokens.values()))


def _decodes(step: SchedulerOutput) -> bool:
    """Whether a step computes one token of each stream, and its drafts, and nothing else."""
    tokens: int = step.total_num_scheduled_tokens
    return 0 < tokens == len(step.num_scheduled_tokens) + _drafts(step)
