"""The followers of a group, as vLLM requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from cfg_core.groups import Group
from cfg_core.logits_processors.config import FIELD as PROCESSORS
from cfg_core.params import SCALE, GuidanceParams
from cfg_core.vllm_plugin.config import asks_for_prompt_logprobs


def is_guided(request: Request) -> bool:
    """Whether a request asks for guidance: a scale other than 1."""
    params = request.sampling_params
    return params is not None and bool(params.extra_args) and params.extra_args.get(SCALE, 1) != 1


def reads_values(sampling: SamplingParams) -> bool:
    """Whether something reads the guided log-probabilities themselves.

    All else reads only their differences, which a constant added to the row does not change. A
    repetition penalty treats positive and negative values differently, and a logits processor may
    do anything.
    """
    return sampling.repetition_penalty != 1 or bool((sampling.extra_args or {}).get(PROCESSORS))


def make_group(
    leader: Request, max_model_len: int, fits: Callable[[int, int], bool]
) -> tuple[Group, Request] | None:
    """The group of a guided request, and its negative stream; None if it can never run.

    The leader's `max_tokens` is cut so that the longer stream ends within `max_model_len`. Both
    streams then end together.

    fits: whether two streams of these lengths in tokens, the leader's first, fit the empty KV pool.
    """
    try:
        params = GuidanceParams.from_fields(leader.sampling_params.extra_args)
    except ValueError:
        return None
    if params is None or params.negative_prompt_token_ids is None:
        return None
    if asks_for_prompt_logprobs(leader.sampling_params):
        return None
    negative = params.negative_prompt_token_ids
    needs_rows = params.logprobs or reads_values(leader.sampling_params)
    group = Group.pair(leader.request_id, params.scale, params.logprobs, needs_rows)
    leader.max_tokens = min(
        leader.max_tokens, max_model_len - max(len(negative), leader.num_prompt_tokens)
    )
    if leader.max_tokens < 1:
        return None
    if not fits(leader.num_prompt_tokens + leader.max_tokens, len(negative) + leader.max_tokens):
        return None
    return group, _follower(leader, group.followers[0], negative)


def _follower(leader: Request, request_id: str, prompt: Sequence[int]) -> Request:
    """Make the follower's request. Every queue order puts it next to its leader."""
    follower = Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        # Greedy sampling is the cheapest, and the leader's token replaces the sample anyway.
        sampling_params=SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=leader.max_tokens
        ),
        pooling_params=None,
        client_index=leader.client_index,
        arrival_time=leader.arrival_time,
        lora_request=leader.lora_request,
        cache_salt=leader.cache_salt,
        priority=leader.priority,
        block_hasher=leader._block_hasher,
    )
    follower.prefill_stats = None
    return follower
