"""Scores of a prompt's last tokens under guidance, as far as the scheduler is concerned.

The streams of a group read their prompts as they always do, each in its own chunks. The workers
keep the hidden states that predict scored tokens (`ScoredRead`). In the group's first joint step,
all streams have read them, and the workers blend them (`Scoring`). So nothing new must run in
lockstep. A stream that is preempted before that step reads them again. A block that comes from the
prefix cache has no hidden states, so prefix-cache hits end before the rows that are needed.

vLLM's own code for the log-probabilities of prompts would show those of the leader alone. It must
not see the request (`hide_from_vllm`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cfg_core.params import Scored
from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin.wire import ScoredRead, Scoring

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def hide_from_vllm(leader: Request) -> None:
    """Let vLLM treat a scored request as one that asks for no log-probabilities of its prompt.

    Other choices of the same client may share its sampling parameters, so they are copied.
    """
    leader.sampling_params = copy.copy(leader.sampling_params)
    leader.sampling_params.prompt_logprobs = None
    leader.skip_reading_prefix_cache = False


def scoring_of(group: Group, leader: Request) -> Scoring | None:
    """What the workers must score in this joint step of `group`; None except in its first one.

    Called when the step's tokens are counted as computed.
    """
    scored = group.scored
    if scored is None or leader.num_computed_tokens != leader.num_prompt_tokens:
        return None
    return Scoring(tuple(leader.prompt_token_ids[-scored.tokens :]), scored.top)


def reads_of(
    groups: Iterable[Group], requests: Mapping[str, Request], scheduled: Mapping[str, int]
) -> list[ScoredRead]:
    """The scored rows that streams compute in a step.

    scheduled: the number of tokens of each stream in the step. They are counted as computed.
    """
    reads: list[ScoredRead] = []
    for group in groups:
        if group.scored is None or requests[group.leader].num_output_tokens:
            continue
        for stream in group.streams:
            if stream in scheduled:
                reads += _reads(requests[stream], scheduled[stream], group.scored.tokens)
    return reads


def _reads(request: Request, scheduled: int, tokens: int) -> Sequence[ScoredRead]:
    """At most one read. Row t of a stream predicts its token t + 1."""
    end = request.num_computed_tokens
    start, last = end - scheduled, request.num_prompt_tokens - 1
    first = last - tokens
    lowest = max(start, first)
    count = min(end, last) - lowest
    if count <= 0:
        return ()
    return (ScoredRead(request.request_id, lowest - start, lowest - first, count),)


def limit_hits(manager: KVCacheManager, most: Callable[[Request], int | None]) -> None:
    """Let prefix-cache hits of a request end at `most(request)` tokens, if that is not None.

    Wraps methods of this engine's manager. vLLM 0.33 passes more arguments to them.
    """
    lookup, find = manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit
    limit: int | None = None

    def get_computed_blocks(request: Request, *args: Any, **kwargs: Any) -> Any:
        nonlocal limit
        limit = most(request)
        try:
            return lookup(request, *args, **kwargs)
        finally:
            limit = None

    def find_longest_cache_hit(
        block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any
    ) -> Any:
        length = max_cache_hit_length if limit is None else min(limit, max_cache_hit_length)
        return find(block_hashes, length, *args, **kwargs)

    manager.get_computed_blocks = get_computed_blocks
    manager.coordinator.find_longest_cache_hit = find_longest_cache_hit


def most_hits(scored: Scored, stream: Request, leader: Request) -> int | None:
    """Tokens of a stream that may come from the prefix cache; None for no limit.

    Once the leader has output, its prompt has been scored.
    """
    if leader.num_output_tokens:
        return None
    return int(stream.num_prompt_tokens) - 1 - scored.tokens
