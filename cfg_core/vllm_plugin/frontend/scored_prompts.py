"""Which requests may ask for log-probabilities of their prompt, beside guidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cfg_core.errors import GuidanceError
from cfg_core.params import GuidanceParams
from cfg_core.params.fields import SCORE_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest

PROMPT_LOGPROBS = "prompt_logprobs"
MOST_ROWS = 2**14
"""Scored tokens, times streams, of one request: all are scored in one step, in which no other
request gets a token."""


def check_scores(config: VllmConfig, request: EngineCoreRequest, params: GuidanceParams) -> None:
    """Raise GuidanceError for log-probabilities of a prompt that cannot be guided.

    A request whose scale is 1 may ask for them: its distribution is the conditional one.
    """
    sampling, tokens = request.sampling_params, params.score_tokens
    if tokens is None:
        asked = (sampling.prompt_logprobs, sampling.prompt_logprob_token_ids)
        if params.enabled and any(one is not None for one in asked):
            raise GuidanceError(
                "log-probabilities of the prompt would be the conditional stream's: set"
                f" {SCORE_TOKENS} to the number of tokens at the prompt's end that are to be"
                f" scored under guidance, or leave out {PROMPT_LOGPROBS} (echo beside logprobs).",
                PROMPT_LOGPROBS,
            )
        return
    params.check_scores(has_logprobs=sampling.prompt_logprobs is not None)
    if sampling.prompt_logprob_token_ids is not None or sampling.flat_logprobs:
        raise GuidanceError(
            f"{SCORE_TOKENS} supports neither prompt_logprob_token_ids nor flat_logprobs: leave"
            " them out.",
            SCORE_TOKENS,
        )
    length = len(request.prompt_token_ids or ())
    if tokens >= length:
        raise GuidanceError(
            f"{SCORE_TOKENS} is {tokens}, and the prompt has {length} tokens: at least one token"
            " must come before those that are scored.",
            SCORE_TOKENS,
        )
    rows = tokens * len(params.weights)
    if params.enabled and rows > MOST_ROWS:
        raise GuidanceError(
            f"{SCORE_TOKENS} is {tokens}, with {len(params.weights)} streams: at most"
            f" {MOST_ROWS // len(params.weights)} tokens of so many streams can be scored at a"
            " time. Score the text in parts, each with what is before it as its context.",
            SCORE_TOKENS,
        )
    if params.enabled:
        _check_engine(config)


def _check_engine(config: VllmConfig) -> None:
    """Refuse engines whose workers do not have all hidden states, or not where they are needed."""
    if config.cache_config.kv_sharing_fast_prefill:
        raise GuidanceError(
            f"{SCORE_TOKENS} does not work with kv_sharing_fast_prefill, which leaves out hidden"
            " states of prompts: start the engine without it.",
            SCORE_TOKENS,
        )
    parallel = config.parallel_config
    if (
        parallel.distributed_executor_backend == "external_launcher"
        and parallel.pipeline_parallel_size > 1
    ):
        raise GuidanceError(
            f"{SCORE_TOKENS} does not work with an external launcher and a pipeline: use tensor"
            " parallelism.",
            SCORE_TOKENS,
        )
    if config.lora_config is not None:
        raise GuidanceError(
            f"{SCORE_TOKENS} does not work on an engine with adapters (enable_lora) yet: serve"
            " the model without them, or with merged weights.",
            SCORE_TOKENS,
        )
