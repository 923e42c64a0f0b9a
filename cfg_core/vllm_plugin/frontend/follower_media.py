"""Images, audio and video of followers, in vLLM's frontend: how prompts with media become streams.

A follower with a prompt of its own has the media of that prompt. One without has the leader's
prompt, and with it the leader's media. vLLM renders a prompt with media into token ids with
placeholders, and one *feature* for each item: its processed data, its hash and its place.

A server renders followers before it sends the request to the engine. It leaves what it rendered in
`PENDING`, and sends the name: extra arguments can hold no tensors there. The guidance itself goes
the same way, because vLLM would look at each token id in it several times.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import argsort_mm_positions
from vllm.renderers.inputs.preprocess import parse_model_prompt

from cfg_core.errors import GuidanceError
from cfg_core.params import GuidanceParams, TokenIds
from cfg_core.vllm_plugin import embeddings

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

Features: TypeAlias = tuple[MultiModalFeatureSpec, ...]
"""The media of one prompt, in the order of their places."""


NO_TOKENS = TokenIds(b"")


class Prompt(NamedTuple):
    """A follower's prompt.

    embeds: instead of token ids, its embeddings (cfg_core/vllm_plugin/embeddings.py).
    """

    token_ids: TokenIds
    features: Features = ()
    embeds: dict[str, Any] | None = None


class PendingInputs:
    """What waits for the requests that a server is about to send to the engine.

    It holds the rendered prompts of followers, and the guidance of whole requests. A name cannot be
    guessed, so a client that sends one of its own finds nothing.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def put(self, value: Mapping[str, Any] | GuidanceParams) -> str:
        """Keep what vLLM's renderer made of a prompt, or guidance; return its name."""
        name = secrets.token_hex(16)
        self._kept[name] = value
        return name

    def get(self, name: str) -> Mapping[str, Any] | None:
        """The rendered prompt of this name; None if there is none."""
        found = self._kept.get(name)
        return None if isinstance(found, GuidanceParams) else found

    def guidance(self, name: object) -> GuidanceParams | None:
        """The guidance of this name; None if there is none."""
        found = self._kept.get(name) if isinstance(name, str) else None
        return found if isinstance(found, GuidanceParams) else None

    def drop(self, names: Iterable[str]) -> None:
        """Forget what was kept. Unknown names are ignored."""
        for name in names:
            self._kept.pop(name, None)

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """Drop these at the end."""
        try:
            yield
        finally:
            self.drop(names)


PENDING = PendingInputs()
"""Those of this process."""

PENDING_GUIDANCE = "cfg_serve_pending"
"""The extra argument that names guidance in PENDING. Any other guidance field must be left out
beside it. A caller of vLLM cannot send it: it looks like guidance, and is no field."""


def check_engine(processor: InputProcessor, param: str) -> None:
    """Raise GuidanceError if followers of this engine cannot have images, audio or video."""
    model = processor.vllm_config.model_config
    if not processor.supports_mm_inputs:
        raise GuidanceError(f"this model reads text only: leave {param} out.", param)
    if model.get_multimodal_config().mm_processor_cache_type == "shm":
        raise GuidanceError(
            "guidance does not support images, audio or video with mm_processor_cache_type='shm':"
            " start the engine with 'lru'.",
            param,
        )


def render(processor: InputProcessor, prompt: dict[str, Any], param: str) -> Mapping[str, Any]:
    """What vLLM makes of a prompt with `multi_modal_data`. Raises GuidanceError.

    vLLM's cache of processed media is left alone: what it holds, it believes to be with the engine.
    """
    renderer, model = processor.renderer, processor.vllm_config.model_config
    try:
        (rendered,) = renderer.render_cmpl(
            [parse_model_prompt(model, prompt)],
            renderer.default_cmpl_tok_params,
            skip_mm_cache=True,
        )
    except (VLLMClientError, ValueError, TypeError, LookupError, AssertionError) as error:
        raise GuidanceError(
            f"{param} cannot be used. Does the prompt show as many images, audio and video as it"
            f" has? vLLM says: {error}",
            param,
        ) from error
    made: Mapping[str, Any] = rendered
    return made


def read(
    processor: InputProcessor, rendered: Mapping[str, Any], lora: LoRARequest | None, param: str
) -> Prompt:
    """A rendered prompt as the prompt of a follower with this adapter. Raises GuidanceError."""
    if rendered["type"] == "embeds":
        ids, are_tokens = rendered.get("prompt_token_ids"), rendered.get("is_token_ids")
        embeds = embeddings.packed(rendered["prompt_embeds"], ids, are_tokens)
        return Prompt(NO_TOKENS, (), embeds)
    ids = TokenIds.of(rendered["prompt_token_ids"])
    if rendered["type"] != "multimodal":
        return Prompt(ids)
    places, hashes = rendered["mm_placeholders"], rendered["mm_hashes"]
    features = tuple(
        MultiModalFeatureSpec(
            data=rendered["mm_kwargs"][modality][i],
            modality=modality,
            identifier=processor._get_mm_identifier(hashes[modality][i], lora),
            mm_position=places[modality][i],
            mm_hash=hashes[modality][i],
        )
        for modality, i in argsort_mm_positions(places)
    )
    _check_sizes(processor, features, param)
    return Prompt(ids, features)


def of_leader(
    processor: InputProcessor, request: EngineCoreRequest, length: int, lora: LoRARequest | None
) -> Features:
    """The leader's media in the first `length` tokens, as those of a follower with this adapter."""
    return tuple(
        replace(
            feature,
            data=None,
            identifier=processor._get_mm_identifier(feature.mm_hash or feature.identifier, lora),
        )
        for feature in request.mm_features or ()
        if feature.mm_position.offset < length
    )


def check_end(
    processor: InputProcessor, features: Sequence[MultiModalFeatureSpec], length: int, param: str
) -> None:
    """Raise GuidanceError if a prompt of `length` tokens ends with an image, audio or video.

    A stream that waits for its partners has computed all but its last token. If that token were
    part of an image, the stream would hold the image's place in the encoder's cache, for which its
    partner may be waiting.
    """
    ahead = processor.vllm_config.num_prefill_lookahead_tokens
    places = (feature.mm_position for feature in features)
    if any(place.offset + place.length + ahead >= length for place in places):
        raise GuidanceError(
            "guidance needs at least one token of text after the last image, audio or video of a"
            " prompt: put the question after it.",
            param,
        )


def check_scored(request: EngineCoreRequest, num_scored: int, param: str) -> None:
    """Raise GuidanceError if one of the scored tokens is a place of an image, audio or video."""
    first = len(request.prompt_token_ids or ()) - num_scored
    places = [feature.mm_position for feature in request.mm_features or ()]
    if num_scored and any(place.offset + place.length > first for place in places):
        raise GuidanceError(
            f"{param} reaches over an image, audio or video of the prompt: score the text after it"
            " alone.",
            param,
        )


def without_repeats(request: EngineCoreRequest, followers: Sequence[Features]) -> list[Features]:
    """The same media, with the data of each item once.

    What the leader has, and what an earlier follower has, is not sent again.
    """
    sent = {feature.mm_hash for feature in request.mm_features or ()}
    out = []
    for features in followers:
        kept = []
        for feature in features:
            kept.append(replace(feature, data=None) if feature.mm_hash in sent else feature)
            sent.add(feature.mm_hash)
        out.append(tuple(kept))
    return out


def forget(processor: InputProcessor, request: EngineCoreRequest) -> None:
    """Let vLLM send the media of a refused request again, should another request have them.

    vLLM's cache believes that what it has processed once is with the engine.
    """
    cache = processor.renderer.mm_processor_cache
    for feature in request.mm_features or ():
        if cache is not None and feature.data is not None and feature.mm_hash is not None:
            cache.invalidate(feature.mm_hash)


def _check_sizes(processor: InputProcessor, features: Features, param: str) -> None:
    """Raise GuidanceError for an item that the encoder's cache can never hold."""
    limit = processor.mm_encoder_cache_size
    for feature in features:
        size = feature.mm_position.get_num_embeds()
        if size > limit:
            raise GuidanceError(
                f"{param} has an item ({feature.modality}) of {size} embeddings, and the encoder's"
                f" cache holds {limit}: send a smaller one, or raise encoder_cache_size.",
                param,
            )
