"""Negatives that are the leader itself with a suffix behind its tokens (`negative_suffix`).

Such a group has one stream. In a joint step the leader computes its next token's row as always,
and the suffix behind it, in the slots and at the positions where its next tokens will be. What it
says behind the last token of the suffix is the negative. Then the suffix is forgotten: the next
step writes over it. So the negative shares each block with its leader, and is exact by causality.

vLLM has a place for such tokens, drafts that are not accepted: it counts them in the step's budget,
and reserves blocks for them without caching these. The suffix is put there before a step is
scheduled (`place`), and taken out again before vLLM counts the step's tokens as computed (`take`,
`forget`), so that no code behind that knows of drafts. The workers get it from us
(`cfg_core.vllm_plugin.wire.SuffixTokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin.wire import SuffixTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


PAD = -1
"""A draft of which nobody knows the token, or that is none."""


def is_complete(group: Group, computed: tuple[int, ...]) -> bool:
    """Whether a step computes all of a group's suffix. Each group without one is complete."""
    return group.suffix == computed


class Suffixes:
    """The groups of one engine that have a suffix now.

    num_tokens: tokens of all their suffixes together.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._groups: dict[str, Group] = {}
        self._placed: dict[str, None] = {}
        self.num_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group: Group) -> None:
        """Note a group that begins."""
        if group.suffix:
            self._groups[group.leader] = group
            self.num_tokens += len(group.suffix)

    def remove(self, leader: str) -> None:
        """Note that a group ends; its leader may go on alone."""
        group = self._groups.pop(leader, None)
        if group is not None:
            self.num_tokens -= len(group.suffix)
            if leader in self._requests:
                self._requests[leader].spec_token_ids = []

    def place(self, held: Collection[str], alone: Collection[str] = ()) -> None:
        """Put each suffix behind its leader, if it may run in the coming step.

        A leader whose newest token is still in a pipeline has nothing that a suffix could follow.

        held: streams that may not run.
        alone: leaders that run without their suffix, and with their drafts, if any (gates.py).
        """
        self._placed = {}
        for leader, group in self._groups.items():
            request = self._requests[leader]
            end = request.num_tokens + request.num_output_placeholders
            may_run = request.status == RequestStatus.RUNNING and leader not in held
            has_own = may_run and request.num_computed_tokens < end
            if has_own and leader in alone:
                continue
            request.spec_token_ids = list(group.suffix) if has_own else []
            if has_own:
                self._placed[leader] = None

    def is_placed(self, leader: str) -> bool:
        """Whether the coming step computes the suffix of a leader, if it is scheduled."""
        return leader in self._placed

    def take(self, scheduler_output: SchedulerOutput) -> tuple[SuffixTokens, ...]:
        """Take the suffixes out of a step that was scheduled. Returns what is computed of them.

        Drafts stay. So do placeholders, which vLLM gives to a stream that it admits for one token,
        if the engine has a drafter.
        """
        drafts = scheduler_output.scheduled_spec_decode_tokens
        taken = []
        for leader in self._placed:
            if PAD not in drafts.get(leader, (PAD,)):
                suffix = self._groups[leader].suffix[: len(drafts.pop(leader))]
                taken.append(SuffixTokens(leader, suffix))
            self._requests[leader].spec_token_ids = []  # vLLM leaves it if the stream did not run
        return tuple(taken)

    def forget(self, taken: Collection[SuffixTokens]) -> None:
        """Count the suffixes of a step as not computed, so that the next tokens replace them."""
        for leader, tokens in taken:
            self._requests[leader].num_computed_tokens -= len(tokens)

    def blocks(self, of: Callable[[int], int]) -> int:
        """An upper bound of the blocks that all suffixes may add to those of the leaders' tokens.

        of: how many blocks a running stream needs at most for so many more tokens.
        """
        return sum(of(len(group.suffix)) for group in self._groups.values())

    def check_integrity(self, leaders: Collection[str]) -> None:
        """Assert what must hold between steps. For tests. leaders: of the live groups."""
        assert self._groups.keys() <= set(leaders)
        assert self.num_tokens == sum(len(group.suffix) for group in self._groups.values())
