"""Requests that have begun elsewhere, in vLLM's frontend: checked, and dealt out to the choices.

`begun_token_ids` are output that exists already (cfg_core/params/begun.py). The engine core makes
them the output of the request (core/begun.py), and sends them with the request's first output. So
the detokenizer, the stop strings, the logprobs and the parsers of vLLM's server read the whole
text, and need no help here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.utils import length_from_prompt_token_ids_or_embeds

from cfg_core.errors import RequestError
from cfg_core.params.begun import BEGUN, FIELD, begun_of, check_open, read_begun

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.parallel_sampling import ParentRequest


def admit_begun(config: VllmConfig, request: EngineCoreRequest, value: object) -> None:
    """Check the tokens that a request has begun with, and put them into it. Raises RequestError.

    Called when the request's `max_tokens` is known.
    """
    sampling: SamplingParams = request.sampling_params
    begun = read_begun(value, sampling.n, config.model_config.get_vocab_size())
    if not any(begun):
        return
    prompt = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    most = min(sampling.max_tokens, config.model_config.max_model_len - prompt)
    # Not `all_stop_token_ids`: with `ignore_eos`, the end token may be anywhere in a text.
    check_open(begun, most, {sampling.eos_token_id, *(sampling.stop_token_ids or ())})
    if request.resumable:
        raise _cannot("a streaming-input session")
    if sampling.prompt_logprobs is not None:
        raise _cannot("prompt_logprobs or guidance_score_tokens, which come before the first token")
    if sampling.logprobs == -1:
        raise _cannot("logprobs of the whole vocabulary (-1)")
    sampling.extra_args = {**(sampling.extra_args or {}), BEGUN: begun}


def _cannot(what: str) -> RequestError:
    return RequestError(f"{FIELD} cannot be combined with {what}: leave one of them out.", FIELD)


def get_child_info(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `ParentRequest.get_child_info`: each choice of `n` gets the tokens that are its own.

    Choices without a seed share their sampling parameters, so these are copied.
    """

    @functools.wraps(stock)
    def get_child_info(self: ParentRequest, index: int) -> tuple[str, SamplingParams]:
        name, sampling = stock(self, index)
        extra: dict[str, Any] = sampling.extra_args or {}
        if BEGUN in extra:
            sampling = copy.copy(sampling)
            sampling.extra_args = {**extra, BEGUN: [begun_of(extra, index)]}
        return name, sampling

    return get_child_info
