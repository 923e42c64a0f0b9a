"""The followers of a group, as vLLM requests.

A guided request is made ready when it arrives, in the thread that vLLM makes requests in: its
guidance is read, and each follower's prompt becomes a list with block hashes. What the scheduler
does later, between two steps, depends on the number of streams alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from cfg_core.errors import GuidanceError
from cfg_core.logits_processors.config import FIELD as PROCESSORS
from cfg_core.params import ResolvedFollower, ResolvedGuidance
from cfg_core.params.resolved import RESOLVED, is_unresolved
from cfg_core.params.timeline import Timeline
from cfg_core.policy.groups import Group, follower_id, output_of_followers
from cfg_core.policy.pool import Lengths
from cfg_core.vllm_plugin import embeddings
from cfg_core.vllm_plugin.core import media
from cfg_core.vllm_plugin.core.prompt_hashes import PromptHashes

_READY = "cfg_serve_ready"
_HASHES = PromptHashes()


@dataclass(frozen=True, slots=True)
class FollowerPrompt:
    """What a follower begins with.

    token_ids: a list that nobody changes; None for embeddings.
    block_hashes: those of its whole blocks, as vLLM computes them.
    media: its images, audio and video.
    """

    own: ResolvedFollower
    token_ids: list[int] | None
    block_hashes: list[BlockHash]
    media: list[MultiModalFeatureSpec]


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """The guidance of a request that has arrived, and its followers' prompts.

    is_open: whether the last marker of the leader's prompt is a start (`guidance_between`).
    """

    guidance: ResolvedGuidance
    prompts: tuple[FollowerPrompt, ...]
    is_open: bool


def make_ready(leader: Request) -> ReadyRequest | None:
    """Read the guidance of a request, and keep what is made of it with the request.

    The guidance leaves the request's sampling parameters, which vLLM sends to each worker. Other
    choices of the same client may share them, so they are copied. None if it is not guided. A
    second call returns the same.
    """
    ready: ReadyRequest | None = getattr(leader, _READY, None)
    sampling = leader.sampling_params
    if ready is not None or sampling is None:
        return ready
    guidance = ResolvedGuidance.from_extra_args(sampling.extra_args)
    if guidance is None:
        return None
    leader.sampling_params = sampling = copy.copy(sampling)
    rest = {name: value for name, value in sampling.extra_args.items() if name != RESOLVED}
    sampling.extra_args = rest or None
    ready = ReadyRequest(guidance, tuple(_prompts(leader, guidance)), _is_open(leader, guidance))
    setattr(leader, _READY, ready)
    return ready


def _is_open(leader: Request, guidance: ResolvedGuidance) -> bool:
    between = None if guidance.timeline is None else guidance.timeline.between
    return between is not None and between.is_open_after(leader.prompt_token_ids or ())


def _prompts(leader: Request, guidance: ResolvedGuidance) -> list[FollowerPrompt]:
    made = []
    for i, own in enumerate(guidance.followers):
        ids = None if own.token_ids is None else own.token_ids.tolist()
        prompt = FollowerPrompt(own, ids, [], media.of_follower(leader, i))
        made.append(replace(prompt, block_hashes=_hashes(leader, prompt)))
    return made


def _hashes(leader: Request, prompt: FollowerPrompt) -> list[BlockHash]:
    """The block hashes of a follower's prompt, which many requests may share."""

    def computed() -> list[BlockHash]:
        follower = _request(leader, "", prompt, [])
        follower.update_block_hashes()
        hashes: list[BlockHash] = follower.block_hashes
        return hashes

    ids, adapter = prompt.own.token_ids, _adapter(leader, prompt.own)
    if ids is None or prompt.media or leader._block_hasher is None:
        return computed()
    lora = adapter and (adapter.lora_name, adapter.lora_path)
    return _HASHES.of(ids.packed, (leader._block_hasher, lora, leader.cache_salt), computed)


def asks_for_guidance(request: Request) -> bool:
    """Whether a request asks for guidance."""
    if make_ready(request) is not None:
        return True
    params = request.sampling_params
    return params is not None and is_unresolved(params.extra_args)


def reads_values(sampling: SamplingParams) -> bool:
    """Whether something reads the guided log-probabilities themselves.

    All else reads only their differences, which a constant added to the row does not change. A
    repetition penalty treats positive and negative values differently, and a logits processor may
    do anything.
    """
    return sampling.repetition_penalty != 1 or bool((sampling.extra_args or {}).get(PROCESSORS))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group, and what its followers begin with.

    timeline: None if all tokens are guided, with the same weights.
    is_open: whether the prompt ends between the timeline's markers.
    """

    group: Group
    prompts: tuple[FollowerPrompt, ...]
    timeline: Timeline | None
    is_open: bool


Fits = Callable[[int, Sequence[int], int], bool]
"""Whether streams of these lengths in tokens, the leader's and the followers', fit the empty KV
pool together, and the slots of a step; the last is that of the leader's suffix."""


def plan_group(leader: Request, max_model_len: int, fits: Fits) -> GroupPlan:
    """The group of a guided request.

    The leader's `max_tokens` is cut so that the longest stream ends within `max_model_len`. All
    streams then end together, or the followers at the end of the window.

    Raises GuidanceError if it can never run. Admission (in the frontend) refuses all of these but
    one: it knows no exact numbers of blocks where a stream takes blocks of several kinds.
    """
    ready = make_ready(leader)
    if ready is None:
        raise GuidanceError(
            "its guidance was not resolved by the frontend of a guided engine: call"
            " guided_engine_args() in the process of the frontend, before its engine is made."
        )
    guidance = ready.guidance
    followers = tuple(follower.num_tokens for follower in guidance.followers)
    end = None if guidance.timeline is None else guidance.timeline.end
    suffix = len(guidance.suffix or ())
    lengths = Lengths(leader.num_prompt_tokens, followers, end, suffix)
    leader.max_tokens = most = lengths.room(leader.max_tokens, max_model_len)
    if most <= leader.num_output_tokens or not fits(*lengths.totals(most), suffix):
        raise GuidanceError(
            f"its {1 + len(followers)} streams with {most - leader.num_output_tokens} more tokens"
            " each can never fit this engine's KV memory: ask for fewer tokens or streams, shorten"
            " the prompts, or give the engine more KV memory."
        )
    group = group_of(leader, guidance)
    return GroupPlan(group, ready.prompts, guidance.timeline, ready.is_open)


def group_of(leader: Request, guidance: ResolvedGuidance) -> Group:
    """The group as the scheduler keeps it."""
    sampling, cuts, strength = leader.sampling_params, guidance.cuts, guidance.strength
    changes = guidance.logprobs or cuts is not None or strength is not None
    names = (follower_id(leader.request_id, i) for i in range(len(guidance.followers)))
    return Group(
        leader.request_id,
        tuple(names),
        guidance.weights,
        logprobs=max(0, sampling.logprobs or 0) if guidance.logprobs else None,
        needs_rows=changes or reads_values(sampling),
        cuts=cuts,
        strength=strength,
        scored=guidance.scored,
        suffix=tuple(guidance.suffix or ()),
    )


def make_followers(
    leader: Request, plan: GroupPlan, is_traced: bool = False, since: int = 0
) -> list[Request]:
    """Make the followers' requests. Every queue order puts them next to their leader.

    If the leader has output, the followers begin with it: its tokens are part of their prompts.

    is_traced: let vLLM count their cached tokens (core/outcome.py).
    since: see `output_of_followers`.
    """
    output = output_of_followers(leader.output_token_ids, since)
    followers = [
        _follower(leader, name, prompt, output)
        for name, prompt in zip(plan.group.followers, plan.prompts, strict=True)
    ]
    if not is_traced:
        for follower in followers:
            follower.prefill_stats = None
    return followers


def _follower(leader: Request, name: str, prompt: FollowerPrompt, output: list[int]) -> Request:
    """A follower with the hashes of its prompt; only blocks with output are hashed here."""
    follower = _request(leader, name, prompt, output)
    follower.block_hashes = list(prompt.block_hashes)
    follower.update_block_hashes()
    return follower


def _request(leader: Request, name: str, prompt: FollowerPrompt, output: list[int]) -> Request:
    """A follower without block hashes."""
    request = Request(
        request_id=name,
        **_tokens(prompt, output),
        # Greedy sampling is the cheapest, and the leader's token replaces the sample anyway.
        sampling_params=SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=max(1, leader.max_tokens - leader.num_output_tokens),
        ),
        pooling_params=None,
        mm_features=list(prompt.media),
        client_index=leader.client_index,
        arrival_time=leader.arrival_time,
        lora_request=_adapter(leader, prompt.own),
        cache_salt=leader.cache_salt,
        priority=leader.priority,
    )
    request._block_hasher = leader._block_hasher
    return request


def _tokens(prompt: FollowerPrompt, output: list[int]) -> dict[str, Any]:
    """A follower's own prompt and the output so far, as arguments of Request."""
    if prompt.token_ids is not None:
        return {"prompt_token_ids": [*prompt.token_ids, *output]}
    assert prompt.own.embeds is not None
    return embeddings.request_fields(prompt.own.embeds, output)


def _adapter(leader: Request, follower: ResolvedFollower) -> LoRARequest | None:
    """The follower's adapter. Between processes it is sent as the list of its fields."""
    if follower.lora is None:
        return leader.lora_request
    return LoRARequest(*follower.lora) if follower.lora else None
