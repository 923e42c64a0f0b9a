"""The prompts and adapters of a request's followers: texts become token ids, and are checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers.inputs.preprocess import parse_model_prompt

from cfg_core.errors import GuidanceError
from cfg_core.params import (
    NEGATIVE_IDS,
    NEGATIVE_TEXT,
    STREAMS,
    FollowerParams,
    GuidanceParams,
    check_token_ids,
)
from cfg_core.vllm_plugin.frontend import capacity

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

_Ids = list[int] | tuple[int, ...]


def resolve(
    processor: InputProcessor, request: EngineCoreRequest, params: GuidanceParams
) -> tuple[GuidanceParams, tuple[str, ...]]:
    """The same guidance with all prompts as token ids, and the field that held each of them.

    A follower's own prompt is followed by the scored tokens. Raises GuidanceError.
    """
    prompt = request.prompt_token_ids
    context = prompt[: len(prompt) - (params.score_tokens or 0)]
    scored = prompt[len(context) :]
    if params.streams is None:
        ids = [*_negative_token_ids(processor, params, context), *scored]
        resolved = replace(params, negative_prompt=None, negative_prompt_token_ids=tuple(ids))
        return resolved, (NEGATIVE_IDS,)
    followers = tuple(_resolved(processor, f, context, scored) for f in params.streams)
    _check_adapters(processor, request, followers)
    return replace(params, streams=followers), tuple(f.where for f in followers)


def _resolved(
    processor: InputProcessor, follower: FollowerParams, context: list[int], scored: list[int]
) -> FollowerParams:
    where = follower.where
    if follower.messages is not None:
        raise GuidanceError(
            f"{where}.messages need a chat endpoint: send prompt or token_ids here.", where
        )
    ids: _Ids = context
    if follower.token_ids is not None:
        vocab_size = processor.vllm_config.model_config.get_vocab_size()
        ids = check_token_ids(follower.token_ids, vocab_size, f"{where}.token_ids")
    elif follower.prompt is not None:
        ids = _tokenize(processor, follower.prompt, f"{where}.prompt") or context[-1:]
    lora = _fields_of(follower.lora, where)
    return replace(follower, prompt=None, token_ids=(*ids, *scored), lora=lora)


def _fields_of(lora: Any, where: str) -> Any:
    """An adapter as the list of its fields, which every process can read. None and False stay."""
    if isinstance(lora, LoRARequest):
        return [lora.lora_name, lora.lora_int_id, lora.lora_path]
    if lora is None or lora is False:
        return lora
    if (
        isinstance(lora, list | tuple)
        and [type(field) for field in lora] == [str, int, str]
        and lora[1] > 0
    ):
        return list(lora)
    raise GuidanceError(
        f"{where}.lora must be vLLM's LoRARequest, or false for the base model.", f"{where}.lora"
    )


def _check_adapters(
    processor: InputProcessor, request: EngineCoreRequest, followers: tuple[FollowerParams, ...]
) -> None:
    """Refuse adapters that can never be in one step."""
    asked = {follower.lora[1] for follower in followers if follower.lora}
    config = processor.vllm_config.lora_config
    if asked and config is None:
        raise GuidanceError(
            "this engine has no adapters: start it with enable_lora, or leave lora out.", STREAMS
        )
    if request.lora_request is not None:
        asked.add(request.lora_request.lora_int_id)
    if config is not None and len(asked) > config.max_loras:
        raise GuidanceError(
            f"the streams use {len(asked)} adapters, and a step of this engine has"
            f" {config.max_loras}: use fewer, or raise max_loras.",
            STREAMS,
        )


def _negative_token_ids(
    processor: InputProcessor, params: GuidanceParams, prompt: list[int]
) -> _Ids:
    """The negative stream's prompt.

    By default, and for a text without tokens, it is the prompt's last token, as in the paper and in
    transformers.
    """
    if params.negative_prompt_token_ids is not None:
        vocab_size = processor.vllm_config.model_config.get_vocab_size()
        return check_token_ids(params.negative_prompt_token_ids, vocab_size)
    if params.negative_prompt is None:
        return prompt[-1:]
    return _tokenize(processor, params.negative_prompt, NEGATIVE_TEXT) or prompt[-1:]


def _tokenize(processor: InputProcessor, text: str, param: str) -> list[int]:
    """Token ids of a follower's text. Special tokens follow the same rule as for a prompt.

    param: the field that errors name.
    """
    renderer = processor.renderer
    if renderer.tokenizer is None:
        instead = NEGATIVE_IDS if param == NEGATIVE_TEXT else "token_ids"
        raise GuidanceError(f"this engine has no tokenizer: send {instead} instead.", param)
    model = processor.vllm_config.model_config
    try:
        (rendered,) = renderer.render_cmpl(
            [parse_model_prompt(model, text)], renderer.default_cmpl_tok_params
        )
    except VLLMClientError as error:  # the renderer refuses plain text only for its length
        raise capacity.negative_too_long(
            f"more than {model.max_model_len}", model.max_model_len, param
        ) from error
    ids: list[int] = rendered["prompt_token_ids"]
    return ids
