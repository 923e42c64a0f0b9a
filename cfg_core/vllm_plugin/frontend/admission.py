"""Admission: checks guided requests in vLLM's frontend, where the caller still gets the error.

It wraps `InputProcessor.process_inputs` (vllm_patches.py). Every entry point (LLM, AsyncLLM, vLLM's
server) passes each request through that method. A request with any guidance field is either refused
or resolved. A resolved request has a `ResolvedGuidance` in the place of these fields, and its
`max_tokens` is cut to what all streams can hold.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.input_processor import InputProcessor

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.grammars.bounds import check_outputs
from cfg_core.logits_processors.config import FIELD as LOGITS_PROCESSORS
from cfg_core.logits_processors.registry import Registry
from cfg_core.params import GuidanceParams, looks_like_guidance
from cfg_core.params.begun import FIELD as BEGUN_FIELD
from cfg_core.params.fields import SCALE, STREAM_LOGPROBS
from cfg_core.policy.groups import FOLLOWER_SUFFIX
from cfg_core.policy.pool import Lengths
from cfg_core.vllm_plugin.config import cannot_guide, refusal
from cfg_core.vllm_plugin.frontend import capacity, follower_media
from cfg_core.vllm_plugin.frontend.begun import admit_begun
from cfg_core.vllm_plugin.frontend.follower_media import PENDING, PENDING_GUIDANCE
from cfg_core.vllm_plugin.frontend.follower_prompts import resolve
from cfg_core.vllm_plugin.frontend.grammar_sandbox import fields_of, is_tried
from cfg_core.vllm_plugin.frontend.markers import with_token_ids
from cfg_core.vllm_plugin.frontend.scored_prompts import check_scores
from cfg_core.vllm_plugin.processes import is_guided_scheduler
from cfg_core.vllm_plugin.processor_registry import registry_of
from cfg_core.vllm_plugin.wire import with_media

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

_REGISTRY = "cfg_serve_logits_processors"


class AdmissionError(VLLMValidationError, ValueError):
    """A request that was refused.

    vLLM's servers answer it with 400. Python callers see a ValueError.
    """

    def __init__(self, error: RequestError) -> None:
        VLLMValidationError.__init__(self, error.message, parameter=error.param)


def process_inputs(stock: Callable[..., EngineCoreRequest]) -> Callable[..., EngineCoreRequest]:
    """Replaces `InputProcessor.process_inputs`: refuses or resolves each request."""

    @functools.wraps(stock)
    def process_inputs(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        rest, fields = without_guidance(params)
        try:
            check_grammar_size(self.vllm_config, params)  # before vLLM reads it
            request = stock(self, request_id, prompt, rest, *args, **kwargs)
        except RequestError as error:
            raise AdmissionError(error) from error
        try:
            admit(self, request, fields, prompt)
        except RequestError as error:
            follower_media.forget(self, request)
            raise AdmissionError(error) from error
        return request

    return process_inputs


def check_grammar_size(config: VllmConfig, params: Any) -> None:
    """Raise RequestError if a request to a guided engine brings a grammar beyond the bounds.

    A grammar that has passed its trial is not checked again.
    """
    outputs = getattr(params, "structured_outputs", None)
    if outputs is None or not _is_guided(config) or is_tried(outputs):
        return
    check_outputs(fields_of(outputs))


def without_guidance(params: Any) -> tuple[Any, dict[str, Any]]:
    """Parameters without the guidance fields of their extra arguments, and these fields.

    `begun_token_ids` is among them. vLLM's own code copies extra arguments and walks through them,
    each token id of a negative. `params` are the caller's, and do not change.
    """
    extra = getattr(params, "extra_args", None) or {}
    fields = {
        name: value
        for name, value in extra.items()
        if name == BEGUN_FIELD or looks_like_guidance(name)
    }
    if not fields:
        return params, fields
    rest = copy.copy(params)
    rest.extra_args = {name: extra[name] for name in extra if name not in fields} or None
    return rest, fields


def admit(
    processor: InputProcessor,
    request: EngineCoreRequest,
    fields: Mapping[str, Any],
    prompt: object = None,
) -> None:
    """Check `request` and put its resolved guidance into it. Raises RequestError.

    It also checks the request's logits processors, and lets a grammar end (`_let_grammar_end`).
    `request.sampling_params` is the processor's private copy, so the caller's object does not
    change.

    fields: its guidance fields, which vLLM has not seen.
    prompt: what `request` was made of.
    """
    sampling: SamplingParams | None = request.sampling_params
    if sampling is None:
        return
    if sampling.structured_outputs is not None and _is_guided(processor.vllm_config):
        _let_grammar_end(processor.vllm_config, sampling)
    asked = (sampling.extra_args or {}).get(LOGITS_PROCESSORS)
    if asked is not None and _is_guided(processor.vllm_config):
        _admit_processors(processor, request, asked)
    if not fields:
        return
    _guide(processor, request, fields, prompt)
    if fields.get(BEGUN_FIELD) is not None:
        _check_engine(processor.vllm_config, BEGUN_FIELD)
        admit_begun(processor.vllm_config, request, fields[BEGUN_FIELD])


def _admit_processors(processor: InputProcessor, request: EngineCoreRequest, asked: object) -> None:
    """Check the logits processors that a request asks for, and put them into their final form."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise RequestError(
            f"{LOGITS_PROCESSORS} need a prompt of text or token ids, not prompt embeddings.",
            LOGITS_PROCESSORS,
        )
    _check_engine(processor.vllm_config, LOGITS_PROCESSORS)
    sampling, registry = request.sampling_params, _registry(processor)
    read = registry.read(asked)
    _check_forced(processor.vllm_config, sampling, registry.forced(read))
    sampling.extra_args = {**sampling.extra_args, LOGITS_PROCESSORS: read}


def _guide(
    processor: InputProcessor, request: EngineCoreRequest, fields: Mapping[str, Any], prompt: object
) -> None:
    """Check the guidance fields of a request, and put what they mean into it."""
    config, sampling = processor.vllm_config, request.sampling_params
    params = PENDING.guidance(fields.get(PENDING_GUIDANCE)) or GuidanceParams.from_fields(fields)
    if params is None:
        return
    check_scores(config, request, params)
    if not params.enabled:
        return
    _check_engine(config, SCALE)
    _check_request(request)
    if params.logprobs and (sampling.logprobs is None or sampling.flat_logprobs):
        raise GuidanceError(
            f"{STREAM_LOGPROBS} needs logprobs, and does not support flat_logprobs: set logprobs"
            " (0 is enough; true in a chat) and leave flat_logprobs out.",
            STREAM_LOGPROBS,
        )
    capacity.check_streams(config, params.num_streams)
    params = with_token_ids(processor, params)
    guidance, names, media = resolve(processor, request, params, prompt)
    prompts = tuple(follower.num_tokens for follower in guidance.followers)
    own = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    lengths = Lengths(own, prompts, params.end, len(guidance.suffix or ()))
    sampling.max_tokens = capacity.max_tokens(config, lengths, sampling, names)
    sampling.extra_args = {**(sampling.extra_args or {}), **guidance.to_extra_args()}
    if any(media):
        request.mm_features = with_media(request.mm_features or (), media)


def _let_grammar_end(config: VllmConfig, sampling: SamplingParams) -> None:
    """Add the tokens that end a text to `allowed_token_ids`.

    The grammar itself allows these tokens only at its end. Without them, a text that has completed
    the grammar could not end.
    """
    if sampling.allowed_token_ids is not None and _masks_from_start(config):
        ends = sampling.all_stop_token_ids.difference(sampling.allowed_token_ids)
        sampling.allowed_token_ids = [*sampling.allowed_token_ids, *sorted(ends)]


def _masks_from_start(config: VllmConfig) -> bool:
    """Whether a grammar applies from the start of the answer, not only after its reasoning."""
    outputs = config.structured_outputs_config
    return not outputs.reasoning_parser or outputs.enable_in_reasoning


def _check_forced(
    config: VllmConfig, sampling: SamplingParams, forced: Iterable[tuple[str, Collection[int]]]
) -> None:
    """Refuse logits processors that force tokens which a mask may forbid.

    forced: the names of these processors, each with the tokens that it forces.
    """
    for name, tokens in forced:
        if sampling.structured_outputs is not None and _masks_from_start(config):
            raise RequestError(
                f"{name} forces tokens that a grammar may forbid: leave one of the two out, or use"
                " a reasoning parser, whose grammar begins after the reasoning.",
                LOGITS_PROCESSORS,
            )
        if sampling.allowed_token_ids is not None and not set(tokens) <= set(
            sampling.allowed_token_ids
        ):
            raise RequestError(
                f"{name} forces tokens that are not in allowed_token_ids: add"
                f" {sorted(tokens)[:20]}, or leave one of the two out.",
                "allowed_token_ids",
            )


def _registry(processor: InputProcessor) -> Registry:
    """The factories of this engine's logits processors, loaded on the first call."""
    registry: Registry | None = getattr(processor, _REGISTRY, None)
    if registry is None:
        registry = registry_of(processor.vllm_config)
        setattr(processor, _REGISTRY, registry)
    return registry


def _is_guided(config: VllmConfig) -> bool:
    return is_guided_scheduler(config.scheduler_config.scheduler_cls)


def _check_engine(config: VllmConfig, param: str) -> None:
    """Refuse a request that an engine without our runners would not serve as asked.

    param: the field that asks for it.
    """
    if not _is_guided(config):
        raise GuidanceError(
            "this engine runs without guidance: start it with guided_engine_args() from"
            " cfg_core.vllm_plugin, or start vLLM's server with the flags that"
            " `python -m cfg_core.vllm_plugin` prints.",
            param,
        )
    cause = cannot_guide(config)
    if cause is not None:
        raise GuidanceError(refusal(cause), param)


def _check_request(request: EngineCoreRequest) -> None:
    """Refuse what guidance cannot do exactly."""
    if request.resumable:
        raise GuidanceError("guidance does not support streaming-input sessions.", SCALE)
    if FOLLOWER_SUFFIX in request.request_id:
        raise GuidanceError(f"a request id may not contain {FOLLOWER_SUFFIX!r}.", "request_id")
