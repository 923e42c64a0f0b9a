"""Speculation as the scheduler sees it: counts of drafts, guided and plain ones apart, and how many each group gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from cfg_core.draft_length import DraftLength, never_pays
from cfg_core.groups import GroupTable

PRIVATE_NAMES = (
    "vllm.v1.spec_decode.metrics:SpecDecodingStats.new",
    "vllm.v1.spec_decode.metrics:SpecDecodingStats.observe_draft",
)


class Speculation:
    """most: drafts in a step, at most; 0 without speculation. cost: see `DraftLength`; 0 never backs off."""

    def __init__(self, groups: GroupTable, most: int, cost: float) -> None:
        self._groups, self._most, self._cost = groups, most, cost
        self._never_pays = never_pays(most, cost)
        self._lengths: dict[str, DraftLength] = {}
        self._planned: dict[str, int] = {}
        self._counts = {"guided": SpecDecodingStats.new(most), "plain": SpecDecodingStats.new(most)}

    def observe(self, request_id: str, drafted: int, kept: int) -> None:
        """A request, plain or a group's leader, had `drafted` drafts verified and kept the first `kept`."""
        guided = request_id in self._groups
        self._counts["guided" if guided else "plain"].observe_draft(drafted, kept)
        if guided:
            self._length(request_id).observe(drafted, kept)

    def plan(self, leaders: Iterable[str]) -> int:
        """Decide how many drafts each of these groups verifies next; returns the largest number."""
        for leader in leaders:
            self._planned[leader] = self._length(leader).next(self._most)
        return max((self._planned[leader] for leader in leaders), default=0)

    def planned(self, leader: str) -> int:
        """How many drafts a group verifies in the step to come."""
        return self._planned.get(leader, self._most)

    def rests(self, num_scheduled_tokens: Mapping[str, int]) -> bool:
        """Whether the drafter may skip a step: groups alone decode in it, and none of them will ever have a draft.

        Prompts it must read: their blocks are cached, and plain requests that meet them there do have drafts.
        """
        return self._never_pays and all(n == 1 and s in self._groups for s, n in num_scheduled_tokens.items())

    def forget(self, leader: str) -> None:
        self._lengths.pop(leader, None)
        self._planned.pop(leader, None)

    def _length(self, leader: str) -> DraftLength:
        return self._lengths.setdefault(leader, DraftLength(self._cost))

    def stats(self) -> dict[str, int]:
        """Counters since start, as `guided_drafts_accepted_at_0`. A step of a group counts once."""
        found = {}
        for kind, counts in self._counts.items() if self._most else ():
            found[f"{kind}_draft_steps"] = counts.num_drafts
            found[f"{kind}_drafts"] = counts.num_draft_tokens
            found[f"{kind}_drafts_accepted"] = counts.num_accepted_tokens
            for i in range(self._most):
                found[f"{kind}_drafts_at_{i}"] = counts.num_draft_tokens_per_pos[i]
                found[f"{kind}_drafts_accepted_at_{i}"] = counts.num_accepted_tokens_per_pos[i]
        return found

    def check_integrity(self) -> None:
        leaders = {group.leader for group in self._groups}
        assert self._lengths.keys() | self._planned.keys() <= leaders
