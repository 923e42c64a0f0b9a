"""Read and check the guidance fields of a JSON body.

The ingress does this before a request is sent to an engine; docs/guidance.md lists the fields. A
field that looks like guidance and is not known is refused: vLLM ignores unknown fields, so a typo
would give unguided text without any error. Imports neither vllm nor ray.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.logits_processors.config import FIELD as LOGITS_PROCESSORS
from cfg_core.params import GuidanceParams, looks_like_guidance
from cfg_core.params.begun import FIELD as BEGUN_TOKEN_IDS
from cfg_core.params.fields import (
    CHAT_FIELDS,
    FIELDS,
    HTTP_FIELDS,
    NEGATIVE_EMBEDS,
    NEGATIVE_IDS,
    NEGATIVE_MESSAGES,
    NEGATIVE_TEXT,
    SCALE,
    SCORE_TOKENS,
    STREAM_LOGPROBS,
    STREAMS,
    SUFFIX_IDS,
    SUFFIX_TEXT,
    SYNONYMS,
    unknown_field,
)
from deployments.requests.body import MAX_FIELDS, json_type
from deployments.requests.endpoints import BODY_FIELDS, Endpoint, follower_body
from deployments.requests.guidance_streams import check_embeds, check_followers, refuse_text

CARRIERS = (
    "vllm_xargs",
    "extra_args",
    "extra_body",
    "extra_params",
    "sampling_params",
    "chat_template_kwargs",
    "generation_config",
    "model_kwargs",
    "custom_params",
    "parameters",
    "params",
    "options",
)
"""Objects in a body in which guidance fields would be ignored or not checked: refused there."""

WITH_STREAM_LOGPROBS: tuple[Endpoint, ...] = ("completion", "chat")
"""The endpoints whose answers can show `guidance_logprobs`."""

MAX_NAME_CHARS = 64
"""Longer names cannot be similar to a field of ours, so they are not compared."""


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The guidance of one HTTP request.

    `read_guidance` makes it from checked fields, and the ingress sends it to the replica. At most
    one of the negatives is set, and none of them beside `params.streams`.
    """

    params: GuidanceParams
    negative_messages: list[Any] | None = None

    @property
    def enabled(self) -> bool:
        """False at scale 1.

        The request is then served without a follower, as a plain one.
        """
        return self.params.enabled

    @property
    def streams(self) -> int:
        """Streams of one group, with the conditional one."""
        return self.params.num_streams if self.enabled else 1

    @property
    def adapters(self) -> tuple[str | bool, ...]:
        """The adapters that its streams name; False is the base model."""
        return tuple(f.lora for f in self.params.streams or () if f.lora is not None)

    def negative_body(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body whose prompt is the negative stream, which is text or messages."""
        return follower_body(endpoint, body, self.params.negative_prompt, self.negative_messages)

    @property
    def negative_field(self) -> str | None:
        """The field that has the negative of a pair.

        None if the negative starts at the prompt's last token.
        """
        if self.negative_messages is not None:
            return NEGATIVE_MESSAGES
        if self.params.negative_prompt is not None:
            return NEGATIVE_TEXT
        if self.params.negative_embeds is not None:
            return NEGATIVE_EMBEDS
        if self.params.negative_suffix is not None:
            return SUFFIX_TEXT
        if self.params.negative_suffix_token_ids is not None:
            return SUFFIX_IDS
        return NEGATIVE_IDS if self.params.negative_prompt_token_ids is not None else None


# --- guidance fields ------------------------------------------------------------------------------


def read_guidance(body: Mapping[str, Any], endpoint: Endpoint) -> Guidance | None:
    """The guidance that a request body asks for; None if it has no guidance fields.

    Raises GuidanceError for every mistake that can be found without the model. The replica checks
    the length of the negative, and whether the group fits the KV pool.
    """
    known = HTTP_FIELDS if endpoint == "completion" else CHAT_FIELDS
    _refuse_begun(body)
    _refuse_hidden_fields(body)
    _refuse_unread_processors(endpoint, body)
    for name in body:
        if (looks_like_guidance(name) and SYNONYMS.get(name, name) not in known) or near_miss(name):
            raise _unknown(name, known)
    refuse_text(body)
    messages = body.get(NEGATIVE_MESSAGES)
    params = GuidanceParams.from_fields(
        {name: value for name, value in body.items() if name != NEGATIVE_MESSAGES}
    )
    if messages is not None:
        params = params or GuidanceParams()
        _check_negative_messages(messages, params)
    if params is None:
        return None
    if params.negative_embeds is not None:
        check_embeds(params.negative_embeds, NEGATIVE_EMBEDS, NEGATIVE_MESSAGES, endpoint)
    check_followers(params.streams or (), endpoint)
    _check_scores(params, endpoint, body)
    guidance = Guidance(params=params, negative_messages=messages)
    if guidance.enabled:
        _refuse_unguidable(endpoint, body)
    return guidance


def models_of(body: Mapping[str, Any], guidance: Guidance | None, base: str) -> list[str]:
    """The served names of the models and adapters that a request uses, without duplicates.

    base: the name of the generator's own model.
    """
    adapters = () if guidance is None else guidance.adapters
    names = [str(body.get("model") or base), *(str(name or base) for name in adapters)]
    return list(dict.fromkeys(names))


@lru_cache(maxsize=4096)
def near_miss(name: str) -> bool:
    """Whether `name` is a misspelt guidance field, such as `guidence_scale`.

    vLLM would ignore such a field.
    """
    return not looks_like_guidance(name) and bool(_near(name, CHAT_FIELDS))


def _near(name: str, known: tuple[str, ...]) -> list[str]:
    return [] if len(name) > MAX_NAME_CHARS else _near_of_short(name, known)


@lru_cache(maxsize=1024)  # the same names come with every request, and the search takes 10 us
def _near_of_short(name: str, known: tuple[str, ...]) -> list[str]:
    return difflib.get_close_matches(name, known, cutoff=0.85)


def _unknown(name: str, known: Sequence[str]) -> GuidanceError:
    if name in FIELDS and name not in CHAT_FIELDS:
        return GuidanceError(
            f"{name} is for Python: over HTTP, send {NEGATIVE_MESSAGES} with image parts.", name
        )
    if name == NEGATIVE_MESSAGES:
        return GuidanceError(f"{name} is for conversations: send {NEGATIVE_TEXT} here.", name)
    return unknown_field(name, known)


def _check_negative_messages(messages: object, params: GuidanceParams) -> None:
    name = NEGATIVE_MESSAGES
    if not isinstance(messages, list):
        raise GuidanceError(f"{name} must be a list of messages, not {json_type(messages)}.", name)
    if not messages:
        hint = "leave the field out to let the negative stream start at the prompt's last token"
        raise GuidanceError(f"{name} is empty: {hint}.", name)
    if params.streams is not None:
        raise GuidanceError(
            f"{name} and {STREAMS} are both given: move the conversation into a stream's messages,"
            " with its weight.",
            name,
        )
    if params.has_negative:
        other = Guidance(params=params).negative_field
        raise GuidanceError(f"{name} and {other} are both given: send only one of them.", name)


def _check_scores(params: GuidanceParams, endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    if params.score_tokens is not None and endpoint != "completion":
        raise GuidanceError(
            f"{SCORE_TOKENS} is for /v1/completions: send the conversation's token ids there"
            " (/tokenize gives them), with echo and logprobs.",
            SCORE_TOKENS,
        )
    echoed = bool(body.get("echo")) and body.get("logprobs") is not None
    params.check_scores(has_logprobs=echoed or body.get("prompt_logprobs") is not None)


def _refuse_begun(body: Mapping[str, Any]) -> None:
    """Raise RequestError for output that a client says its request has already."""
    for fields in (body, *(carried(body, carrier) for carrier in CARRIERS)):
        if BEGUN_TOKEN_IDS in fields:
            raise RequestError(
                f"{BEGUN_TOKEN_IDS} is for Python: over HTTP, leave it out, and send the text as"
                " the end of the prompt, or as the last message with continue_final_message.",
                BEGUN_TOKEN_IDS,
            )


def _refuse_hidden_fields(body: Mapping[str, Any]) -> None:
    """Raise GuidanceError for guidance fields or logits processors inside one of CARRIERS.

    vLLM would ignore them there, or they would reach the engine without a check.
    """
    for carrier in CARRIERS:
        for name in carried(body, carrier):
            if looks_like_guidance(name) or name == LOGITS_PROCESSORS:
                raise GuidanceError(
                    f"{name} is inside {carrier}: move it to the top level of the body.",
                    carrier,
                )


def carried(body: Mapping[str, Any], carrier: str) -> Mapping[str, Any]:
    """The object called `carrier` in the body; empty if there is none.

    Raises RequestError if it has too many fields.
    """
    inner = body.get(carrier)
    if not isinstance(inner, Mapping):
        return {}
    if len(inner) > MAX_FIELDS:
        raise RequestError(
            f"{carrier} has {len(inner)} fields: send at most {MAX_FIELDS}.", carrier
        )
    return inner


def _refuse_unread_processors(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raise RequestError for `logits_processors` that are misspelt, or that cannot be applied.

    vLLM would ignore the field, and the request would run without its processors.
    """
    if endpoint == "scoring" and body.get(LOGITS_PROCESSORS) is not None:
        raise RequestError(
            f"Generative scoring does not support {LOGITS_PROCESSORS}: leave them out.",
            LOGITS_PROCESSORS,
        )
    for name in body.keys() - {LOGITS_PROCESSORS}:
        if _near(name, (LOGITS_PROCESSORS,)):
            raise RequestError(
                f"{name} is not a field of this server. Did you mean {LOGITS_PROCESSORS}?", name
            )
    if body.get("use_beam_search") and body.get(LOGITS_PROCESSORS) is not None:
        raise RequestError(
            f"Beam search does not support {LOGITS_PROCESSORS}: leave one of the two out.",
            LOGITS_PROCESSORS,
        )


def _refuse_unguidable(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raise GuidanceError for requests and options under which a joint step has no meaning."""
    if not BODY_FIELDS[endpoint].guided:
        raise GuidanceError(
            "This endpoint cannot be guided: send guided requests to /v1/completions or"
            " /v1/chat/completions, one for each conversation.",
            SCALE,
        )
    if body.get(STREAM_LOGPROBS) and endpoint not in WITH_STREAM_LOGPROBS:
        raise GuidanceError(
            f"Answers of this endpoint have no place for {STREAM_LOGPROBS}: leave it out, or use"
            " /v1/completions or /v1/chat/completions.",
            STREAM_LOGPROBS,
        )
    if body.get("use_beam_search"):
        raise GuidanceError(
            "Beam search cannot be guided: leave out use_beam_search, or the guidance fields.",
            "use_beam_search",
        )
    if body.get("suffix") is not None:
        raise GuidanceError(
            "Completions with suffix cannot be guided: leave out suffix, or the guidance fields.",
            "suffix",
        )
