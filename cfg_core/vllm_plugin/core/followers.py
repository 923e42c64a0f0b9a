"""The followers of a group, as vLLM requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from cfg_core.errors import GuidanceError
from cfg_core.groups import Cuts, Group, Scored, follower_id
from cfg_core.logits_processors.config import FIELD as PROCESSORS
from cfg_core.params import FollowerParams, GuidanceParams, is_guided
from cfg_core.pool import Lengths
from cfg_core.timeline import Timeline
from cfg_core.vllm_plugin import embeddings
from cfg_core.vllm_plugin.config import asks_for_prompt_logprobs
from cfg_core.vllm_plugin.core import media
from cfg_core.vllm_plugin.core.scoring import can_be_scored


def asks_for_guidance(request: Request) -> bool:
    """Whether a request asks for guidance: followers, or a scale other than 1."""
    params = request.sampling_params
    return params is not None and is_guided(params.extra_args)


def reads_values(sampling: SamplingParams) -> bool:
    """Whether something reads the guided log-probabilities themselves.

    All else reads only their differences, which a constant added to the row does not change. A
    repetition penalty treats positive and negative values differently, and a logits processor may
    do anything.
    """
    return sampling.repetition_penalty != 1 or bool((sampling.extra_args or {}).get(PROCESSORS))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group, and what its followers begin with, each with a prompt as token ids.

    media: the images, audio and video of each follower's prompt.
    """

    group: Group
    followers: tuple[FollowerParams, ...]
    media: tuple[list[MultiModalFeatureSpec], ...]


Fits = Callable[[int, Sequence[int]], bool]
"""Whether streams of these lengths in tokens, the leader's and the followers', fit the empty KV
pool together, and the slots of a step."""


def plan_group(leader: Request, max_model_len: int, fits: Fits) -> GroupPlan:
    """The group of a guided request.

    The leader's `max_tokens` is cut so that the longest stream ends within `max_model_len`. All
    streams then end together, or the followers at the end of the window.

    Raises GuidanceError if it can never run. Admission (in the frontend) refuses all of these but
    one: it knows no exact numbers of blocks where a stream takes blocks of several kinds.
    """
    params = _params_of(leader)
    followers = params.followers
    if params.score_tokens is not None:
        if not can_be_scored(leader, followers, params.score_tokens):
            raise GuidanceError("its streams do not all end with the tokens to score.")
    elif asks_for_prompt_logprobs(leader.sampling_params):
        raise GuidanceError("it asks for log-probabilities of its whole prompt.")
    prompts = tuple(follower.num_tokens for follower in followers)
    lengths = Lengths(leader.num_prompt_tokens, prompts, params.end)
    leader.max_tokens = lengths.room(leader.max_tokens, max_model_len)
    if leader.max_tokens < 1 or not fits(*lengths.totals(leader.max_tokens)):
        raise GuidanceError(
            f"its {1 + len(followers)} streams with {leader.max_tokens} more tokens each can never"
            " fit this engine's KV memory: ask for fewer tokens or streams, shorten the prompts, or"
            " give the engine more KV memory."
        )
    shown = tuple(media.of_follower(leader, i) for i in range(len(followers)))
    return GroupPlan(group_of(leader, params), followers, shown)


def _params_of(leader: Request) -> GuidanceParams:
    try:
        params = GuidanceParams.from_fields(leader.sampling_params.extra_args)
    except ValueError as error:
        raise GuidanceError(str(error)) from None
    if params is None or not params.followers:
        raise GuidanceError("it has no negative stream.")
    return params


def group_of(leader: Request, params: GuidanceParams) -> Group:
    """The group as the scheduler keeps it."""
    cuts = Cuts(params.top_k, params.min_p, params.filter_top_k)
    is_cut = cuts != Cuts()
    names = tuple(follower_id(leader.request_id, i) for i in range(len(params.weights) - 1))
    return Group(
        leader.request_id,
        names,
        params.weights,
        max(0, leader.sampling_params.logprobs or 0) if params.logprobs else None,
        params.logprobs or is_cut or reads_values(leader.sampling_params),
        cuts if is_cut else None,
        timeline_of(params),
        scored_of(leader, params),
    )


def scored_of(leader: Request, params: GuidanceParams) -> Scored | None:
    """The end of the prompt that is scored; None if no token is."""
    if params.score_tokens is None:
        return None
    return Scored(params.score_tokens, leader.sampling_params.prompt_logprobs)


def timeline_of(params: GuidanceParams) -> Timeline | None:
    """When the weights change and end; None if they never do."""
    if params.schedule is None and params.start == 0 and params.end is None:
        return None
    changes = [(0, params.weights)]
    if params.schedule is not None:
        changes = [(first, (scale, 1.0 - scale)) for first, scale in params.schedule]
    return Timeline(tuple(changes), params.start, params.end)


def make_followers(leader: Request, plan: GroupPlan, is_traced: bool = False) -> list[Request]:
    """Make the followers' requests. Every queue order puts them next to their leader.

    If the leader has output, the followers begin with it: its tokens are part of their prompts.

    is_traced: let vLLM count their cached tokens (core/follower_events.py).
    """
    output = list(leader.output_token_ids)
    followers = [
        _follower(leader, name, output, params, shown)
        for name, params, shown in zip(
            plan.group.followers, plan.followers, plan.media, strict=True
        )
    ]
    if not is_traced:
        for follower in followers:
            follower.prefill_stats = None
    return followers


def _follower(
    leader: Request,
    request_id: str,
    output: list[int],
    params: FollowerParams,
    shown: list[MultiModalFeatureSpec],
) -> Request:
    return Request(
        request_id=request_id,
        **_prompt(params, output),
        # Greedy sampling is the cheapest, and the leader's token replaces the sample anyway.
        sampling_params=SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=leader.max_tokens - leader.num_output_tokens,
        ),
        pooling_params=None,
        mm_features=list(shown),
        client_index=leader.client_index,
        arrival_time=leader.arrival_time,
        lora_request=_adapter(leader, params),
        cache_salt=leader.cache_salt,
        priority=leader.priority,
        block_hasher=leader._block_hasher,
    )


def _prompt(params: FollowerParams, output: list[int]) -> dict[str, Any]:
    """A follower's own prompt and the output so far, as arguments of Request."""
    if params.prompt_embeds is None:
        return {"prompt_token_ids": [*(params.token_ids or ()), *output]}
    return embeddings.request_fields(params.prompt_embeds, output)


def _adapter(leader: Request, params: FollowerParams) -> LoRARequest | None:
    """The follower's adapter. Between processes it is sent as the list of its fields."""
    if params.lora is None:
        return leader.lora_request
    return LoRARequest(*params.lora) if params.lora else None
