"""The prompts, media and adapters of a request's followers: made, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers.inputs.preprocess import parse_model_prompt

from cfg_core.errors import GuidanceError
from cfg_core.params import (
    FollowerParams,
    GuidanceParams,
    ResolvedFollower,
    ResolvedGuidance,
    TokenIds,
)
from cfg_core.params.checks import check_token_ids
from cfg_core.params.fields import (
    NEGATIVE_EMBEDS,
    NEGATIVE_IDS,
    NEGATIVE_MEDIA,
    NEGATIVE_TEXT,
    SCALE,
    SCORE_TOKENS,
    STREAMS,
)
from cfg_core.vllm_plugin import embeddings
from cfg_core.vllm_plugin.frontend import capacity, follower_media
from cfg_core.vllm_plugin.frontend.follower_media import NO_TOKENS, Features, Prompt
from cfg_core.vllm_plugin.frontend.suffixes import suffix_of

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor


class ResolvedRequest(NamedTuple):
    """Guidance as the engine core reads it.

    fields: the field that held each follower's prompt, for errors.
    media: the images, audio and video of each follower.
    """

    guidance: ResolvedGuidance
    fields: tuple[str, ...]
    media: list[Features]


class _Leader(NamedTuple):
    """What followers may take from their leader.

    scored: the last tokens of its prompt, which all streams have.
    text: its prompt as it was written; None if it is not known.
    """

    request: EngineCoreRequest
    scored: TokenIds
    text: str | None

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt before the scored ones."""
        return len(self.request.prompt_token_ids or ()) - len(self.scored)

    @property
    def context(self) -> TokenIds:
        """Its prompt before the scored tokens."""
        return TokenIds.of((self.request.prompt_token_ids or ())[: self.num_tokens])


def resolve(
    processor: InputProcessor, request: EngineCoreRequest, params: GuidanceParams, prompt: object
) -> ResolvedRequest:
    """The same guidance with all prompts as token ids, or as packed embeddings.

    A follower's own prompt is followed by the scored tokens. Raises GuidanceError.

    prompt: what the caller gave to vLLM, or what vLLM's renderer made of it.
    """
    if params.has_suffix:
        suffix = suffix_of(processor, request, params)
        return ResolvedRequest(ResolvedGuidance.of(params, (), suffix=suffix), (), [])
    ids, scored = request.prompt_token_ids or [], params.score_tokens or 0
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    leader = _Leader(request, TokenIds.of(ids[len(ids) - scored :]), text)
    _check_media(processor, leader, params)
    if params.streams is None:
        prompts, loras = [_negative(processor, leader, params)], [None]
        fields: tuple[str, ...] = (NEGATIVE_IDS,)
    else:
        loras = [_fields_of(stream.lora, stream.where) for stream in params.streams]
        prompts = [
            _own(processor, stream, lora, leader)
            for stream, lora in zip(params.streams, loras, strict=True)
        ]
        _check_adapters(processor, request, loras)
        fields = tuple(stream.where for stream in params.streams)
    embeds = [request.prompt_embeds, *(own.embeds for own in prompts)]
    if scored and any(value is not None for value in embeds):
        raise GuidanceError(
            f"{SCORE_TOKENS} needs prompts of text or token ids, not prompt embeddings.",
            SCORE_TOKENS,
        )
    for own, field in zip(prompts, fields, strict=True):
        follower_media.check_end(processor, own.features, len(own.token_ids) + scored, field)
    media = follower_media.without_repeats(request, [own.features for own in prompts])
    followers = tuple(
        ResolvedFollower(token_ids=_with_scores(own, leader), embeds=own.embeds, lora=lora)
        for own, lora in zip(prompts, loras, strict=True)
    )
    top = request.sampling_params.prompt_logprobs
    return ResolvedRequest(ResolvedGuidance.of(params, followers, top), fields, media)


def _check_media(processor: InputProcessor, leader: _Leader, params: GuidanceParams) -> None:
    """Refuse media that this engine, or these prompts, cannot have."""
    request = leader.request
    given = [(params.negative_media, NEGATIVE_MEDIA)]
    given += [(f.multi_modal_data, f"{f.where}.multi_modal_data") for f in params.streams or ()]
    asked = [param for media, param in given if media is not None and not _is_embeds(media)]
    if request.mm_features or asked:
        follower_media.check_engine(processor, next(iter(asked), SCALE))
    follower_media.check_scored(request, len(leader.scored), SCORE_TOKENS)
    length = len(request.prompt_token_ids or ())
    follower_media.check_end(processor, request.mm_features or (), length, "prompt")


def _is_embeds(media: object) -> bool:
    """Whether this is the name of a rendered prompt of embeddings."""
    rendered = follower_media.PENDING.get(media) if isinstance(media, str) else None
    return rendered is not None and rendered["type"] == "embeds"


def _own(processor: InputProcessor, follower: FollowerParams, lora: Any, leader: _Leader) -> Prompt:
    """The follower's prompt, without the scored tokens.

    lora: its adapter, as `_fields_of` returns it.
    """
    where = follower.where
    if follower.messages is not None:
        raise GuidanceError(
            f"{where}.messages need a chat endpoint: send prompt or token_ids here.", where
        )
    adapter = leader.request.lora_request if lora is None else LoRARequest(*lora) if lora else None
    ids = _known(processor, follower.token_ids, f"{where}.token_ids")
    if follower.prompt_embeds is not None:
        return _with_embeds(processor, follower.prompt_embeds, f"{where}.prompt_embeds")
    if follower.multi_modal_data is not None:
        given = (follower.prompt, ids, follower.multi_modal_data)
        return _with_media(processor, leader, given, adapter, where)
    if ids is not None:
        return Prompt(ids)
    if follower.prompt is not None:
        tokens = _tokenize(processor, follower.prompt, f"{where}.prompt")
        return Prompt(tokens or _last(leader, f"{where}.prompt"))
    request = leader.request
    if request.prompt_embeds is not None:
        known = request.prompt_token_ids, request.prompt_is_token_ids
        return Prompt(NO_TOKENS, (), embeddings.packed(request.prompt_embeds, *known))
    shown = follower_media.of_leader(processor, request, leader.num_tokens, adapter)
    return Prompt(leader.context, shown)


def _known(processor: InputProcessor, ids: Sequence[int] | None, param: str) -> TokenIds | None:
    """The same ids. Raises GuidanceError if one of them is outside of the model's vocabulary."""
    if ids is None:
        return None
    packed, vocab_size = TokenIds.of(ids), processor.vllm_config.model_config.get_vocab_size()
    return packed if largest(packed) < vocab_size else check_token_ids(packed, param, vocab_size)


def largest(ids: TokenIds) -> int:
    """The largest of ids; 0 if there are none."""
    return int(np.frombuffer(ids.packed, np.uint32).max(initial=0))


def _with_scores(own: Prompt, leader: _Leader) -> TokenIds | None:
    """A follower's token ids, those that are scored included; None for embeddings."""
    return None if own.embeds is not None else own.token_ids + leader.scored


def _last(leader: _Leader, param: str) -> TokenIds:
    """The prompt's last token, which stands for a negative that is not given or has no token."""
    are_tokens = leader.request.prompt_is_token_ids or [leader.request.prompt_embeds is None]
    if not are_tokens[-1]:
        raise GuidanceError(
            "a prompt of embeddings has no last token to be its negative: give a negative of at"
            " least one token, or embeddings.",
            param,
        )
    ids, end = leader.request.prompt_token_ids or (), leader.num_tokens
    return TokenIds.of(ids[max(0, end - 1) : end])


def _with_embeds(processor: InputProcessor, value: object, param: str) -> Prompt:
    """The prompt of a follower with embeddings of its own."""
    model = processor.vllm_config.model_config
    return Prompt(NO_TOKENS, (), embeddings.packed(embeddings.read(model, value, param)))


def _with_media(
    processor: InputProcessor,
    leader: _Leader,
    given: tuple[str | None, TokenIds | None, Any],
    adapter: LoRARequest | None,
    where: str,
) -> Prompt:
    """The prompt of a follower with media of its own.

    given: its text, its token ids, and its media. Without both, it takes the leader's text.
    """
    text, ids, media = given
    if isinstance(media, str):
        rendered = follower_media.PENDING.get(media)
        if rendered is None:
            raise GuidanceError(
                f"{where} has text for its images: over HTTP, send messages with image parts.",
                where,
            )
        return follower_media.read(processor, rendered, adapter, where)
    if text is None and ids is None:
        text = leader.text
        if not text:
            raise GuidanceError(
                f"{where} has images and no prompt, and the text of the conditional prompt is not"
                " known: give a prompt, too.",
                where,
            )
    prompt = {"prompt": text} if ids is None else {"prompt_token_ids": ids.tolist()}
    made = follower_media.render(processor, {**prompt, "multi_modal_data": media}, where)
    return follower_media.read(processor, made, adapter, where)


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
    processor: InputProcessor, request: EngineCoreRequest, loras: Sequence[Any]
) -> None:
    """Refuse adapters that can never be in one step.

    loras: those of the followers, as `_fields_of` returns them.
    """
    asked = {lora[1] for lora in loras if lora}
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


def _negative(processor: InputProcessor, leader: _Leader, params: GuidanceParams) -> Prompt:
    """The negative stream's prompt, without the scored tokens.

    By default, and for a text without tokens, it is the prompt's last token, as in the paper and in
    transformers.
    """
    if params.negative_embeds is not None:
        return _with_embeds(processor, params.negative_embeds, NEGATIVE_EMBEDS)
    ids = _known(processor, params.negative_prompt_token_ids, NEGATIVE_IDS)
    if params.negative_media is not None:
        given = (params.negative_prompt, ids, params.negative_media)
        adapter = leader.request.lora_request
        return _with_media(processor, leader, given, adapter, NEGATIVE_MEDIA)
    if ids is not None:
        return Prompt(ids)
    if params.negative_prompt is None:
        return Prompt(_last(leader, NEGATIVE_TEXT))
    tokens = _tokenize(processor, params.negative_prompt, NEGATIVE_TEXT)
    return Prompt(tokens or _last(leader, NEGATIVE_TEXT))


def _tokenize(processor: InputProcessor, text: str, param: str) -> TokenIds:
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
    return TokenIds.of(rendered["prompt_token_ids"])
