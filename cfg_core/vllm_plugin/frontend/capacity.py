"""How many tokens a guided request may generate: what the context and the KV pool leave room for.

Pure but for what it reads of vLLM's config. admission.py calls it once all prompts are token ids.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cfg_core.errors import CapacityError
from cfg_core.params.fields import STREAMS
from cfg_core.policy.pool import Lengths, Pool
from cfg_core.vllm_plugin.config import drafting_slots, kv_split_of, max_followers_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


def check_streams(config: VllmConfig, streams: int) -> None:
    """Raise CapacityError if no step can have so many streams of one group."""
    most = 1 + max_followers_of(config)
    if streams > most:
        raise CapacityError(
            f"the group has {streams} streams, and this engine takes {most} with the conditional"
            " one: send fewer, or set max_followers.",
            STREAMS,
        )
    slots: int = config.scheduler_config.max_num_seqs
    speculation = config.speculative_config
    drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
    budget: int = config.scheduler_config.max_num_batched_tokens
    if streams > slots or streams * (1 + drafts + drafting_slots(config)) > budget:
        raise CapacityError(
            f"the group has {streams} streams, and a step of this engine has {slots} places and"
            f" {budget} tokens: send fewer streams, or raise max_num_seqs and"
            " max_num_batched_tokens.",
            STREAMS,
        )


def max_tokens(
    config: VllmConfig, prompts: Lengths, sampling: SamplingParams, params: Sequence[str]
) -> int:
    """Return the request's `max_tokens`, cut to what all streams can hold.

    The context length limits the longest stream. If the caller did not set `max_tokens`, it is also
    cut to what the KV pool holds. Raises CapacityError if the group can never run.

    params: the field that holds each follower's prompt, for errors.
    """
    limit: int = config.model_config.max_model_len
    for length, param in zip(prompts.followers, params, strict=True):
        if length >= limit:
            raise negative_too_long(str(length), limit, param)
    asked: int = sampling.max_tokens
    most = prompts.room(asked, limit)
    pool = _pool(config)
    if pool is not None and not _fits(config, pool, prompts, most):
        if asked < limit - prompts.prompt:
            raise _too_large(config, prompts, asked, pool)
        # The caller set no max_tokens, so vLLM set it to the rest of the context. Take as much of
        # that as the pool holds.
        most = _most_tokens(config, pool, prompts, most)
        if most < 1:
            raise _too_large(config, prompts, 1, pool)
    if sampling.min_tokens > most:
        raise CapacityError(
            f"min_tokens is {sampling.min_tokens}, but these prompts leave room for only"
            f" {most} tokens: lower min_tokens, or shorten the prompts.",
            "min_tokens",
        )
    return most


def negative_too_long(num_tokens: str, limit: int, param: str) -> CapacityError:
    return CapacityError(
        f"the negative prompt has {num_tokens} tokens; with at least one output token it must fit"
        f" the model's context of {limit}: shorten it.",
        param,
    )


def _pool(config: VllmConfig) -> Pool | None:
    """The empty KV pool, in blocks of `block_size` tokens; None while it is unknown."""
    cache = config.cache_config
    tokens: int | None = cache.kv_cache_size_tokens
    if tokens is None:
        return None
    watermark = int(config.scheduler_config.watermark * (cache.num_gpu_blocks or 0))
    return Pool(int(tokens // cache.block_size) - 1, watermark, kv_split_of(config))


def _fits(config: VllmConfig, pool: Pool, prompts: Lengths, max_tokens: int) -> bool:
    """Whether all streams fit the empty pool with `max_tokens` output tokens."""
    size: int = config.cache_config.block_size
    leader, followers = prompts.totals(max_tokens)
    return pool.fits(-(-leader // size), [-(-tokens // size) for tokens in followers])


def _most_tokens(config: VllmConfig, pool: Pool, prompts: Lengths, at_most: int) -> int:
    """The largest number of output tokens, at most `at_most`, with which the group fits; or 0."""
    too_many = bisect.bisect_left(
        range(at_most + 1), True, key=lambda n: not _fits(config, pool, prompts, n)
    )
    return max(too_many - 1, 0)


def _too_large(config: VllmConfig, prompts: Lengths, max_tokens: int, pool: Pool) -> CapacityError:
    most = _most_tokens(config, pool, prompts, max_tokens)
    advice = f"ask for at most {most} tokens" if most > 0 else "shorten the prompts"
    tokens = (pool.limit - pool.watermark) * config.cache_config.block_size
    role = " for each role" if pool.limit < pool.blocks else ""
    times = {1: "twice"}.get(len(prompts.followers), f"{1 + len(prompts.followers)} times")
    needed = (
        f"the negative suffix ({prompts.suffix}) and max_tokens ({max_tokens})"
        if prompts.suffix
        else f"the negative prompt ({sum(prompts.followers)}) and {times} max_tokens ({max_tokens})"
    )
    return CapacityError(
        f"the prompt ({prompts.prompt} tokens), {needed} can never fit the KV pool of {tokens}"
        f" tokens{role}: {advice}, or give the engine more KV memory.",
        "max_tokens",
    )
