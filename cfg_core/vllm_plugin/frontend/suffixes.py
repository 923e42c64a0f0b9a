"""The suffix of a request, behind which it is its own negative: as token ids, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cfg_core.errors import CapacityError, GuidanceError
from cfg_core.params import GuidanceParams, TokenIds
from cfg_core.params.checks import check_token_ids
from cfg_core.params.fields import NEGATIVE_IDS, SUFFIX_IDS, SUFFIX_TEXT
from cfg_core.vllm_plugin.config import is_recurrent, rows_per_stream

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

MOST_TOKENS = 1024
"""Tokens of a suffix. All of them are computed again for each token, and sent to the workers."""

MOST_CHARACTERS = 16 * MOST_TOKENS
"""Of a text, so that it takes the tokenizer some milliseconds at most."""


def suffix_of(
    processor: InputProcessor, request: EngineCoreRequest, params: GuidanceParams
) -> TokenIds:
    """The tokens of a request's suffix.

    Raises GuidanceError if it cannot be used, on this engine or beside this prompt, and
    CapacityError if no step can have it.
    """
    config = processor.vllm_config
    field = SUFFIX_TEXT if params.negative_suffix is not None else SUFFIX_IDS
    _check_engine(config, field)
    if request.prompt_embeds is not None or request.mm_features:
        raise GuidanceError(
            f"{field} needs a prompt of text or token ids, without images, audio, video and"
            f" embeddings: send another negative, such as {NEGATIVE_IDS}.",
            field,
        )
    suffix = _tokens(processor, params)
    _check_size(config, len(suffix), len(request.prompt_token_ids or ()), field)
    return suffix


def _tokens(processor: InputProcessor, params: GuidanceParams) -> TokenIds:
    """A text is the tokens that the tokenizer makes of it alone, without special ones."""
    vocab_size = processor.vllm_config.model_config.get_vocab_size()
    if params.negative_suffix is None:
        return check_token_ids(params.negative_suffix_token_ids, SUFFIX_IDS, vocab_size)
    tokenizer = processor.renderer.tokenizer
    if tokenizer is None:
        raise GuidanceError(
            f"this engine has no tokenizer: send {SUFFIX_IDS} instead.", SUFFIX_TEXT
        )
    if len(params.negative_suffix) > MOST_CHARACTERS:
        raise CapacityError(
            f"{SUFFIX_TEXT} has {len(params.negative_suffix)} characters: send at most"
            f" {MOST_CHARACTERS}.",
            SUFFIX_TEXT,
        )
    ids = tokenizer.encode(params.negative_suffix, add_special_tokens=False)
    return check_token_ids(ids, SUFFIX_TEXT, vocab_size, if_empty="send another text")


def _check_engine(config: VllmConfig, field: str) -> None:
    """Refuse engines that cannot compute a suffix and forget it."""
    parallel = config.parallel_config
    causes = {
        "models with recurrent state, which cannot forget a suffix": is_recurrent(config),
        "kv_sharing_fast_prefill: start the engine without it": (
            config.cache_config.kv_sharing_fast_prefill
        ),
        "an external launcher and a pipeline: use tensor parallelism": (
            parallel.distributed_executor_backend == "external_launcher"
            and parallel.pipeline_parallel_size > 1
        ),
        "engines without chunked prefill: start this one with enable_chunked_prefill": (
            not config.scheduler_config.enable_chunked_prefill
        ),
    }
    cause = next((cause for cause, applies in causes.items() if applies), None)
    if cause is not None:
        raise GuidanceError(
            f"{field} does not work with {cause}. Other negatives do, such as {NEGATIVE_IDS}.",
            field,
        )


def _check_size(config: VllmConfig, tokens: int, prompt: int, field: str) -> None:
    scheduler = config.scheduler_config
    threshold: int = scheduler.long_prefill_token_threshold
    budget: int = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    most = min(MOST_TOKENS, budget - rows_per_stream(config), (threshold or budget) - 1)
    if tokens > most:
        raise CapacityError(
            f"{field} has {tokens} tokens, and a step of this engine can compute {most} behind a"
            " token: shorten it, or raise max_num_batched_tokens and long_prefill_token_threshold"
            f" (at most {MOST_TOKENS} in any case).",
            field,
        )
    limit: int = config.model_config.max_model_len
    if prompt + tokens >= limit:
        raise CapacityError(
            f"the prompt ({prompt} tokens) and {field} ({tokens}) leave no room for an output token"
            f" in the model's context of {limit}: shorten one of them.",
            field,
        )
