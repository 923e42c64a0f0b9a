"""HTTP contract, without a server: JSON bodies in, guidance out. Imports neither vllm nor ray.

The guidance fields of contract 5.2 are read here, in the ingress, before an engine is bothered.
Everything that looks like guidance and is not understood is refused: vLLM ignores fields that it does
not know, so a typo would turn into silently unguided text.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NoReturn

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.params import (
    FIELDS,
    NEGATIVE_IDS,
    NEGATIVE_TEXT,
    SCALE,
    SYNONYMS,
    GuidanceParams,
    check_scale,
    looks_like_guidance,
    unknown_field,
)
from cfg_core.processor_config import FIELD as LOGITS_PROCESSORS

Endpoint = Literal["completion", "chat"]

NEGATIVE_MESSAGES = "negative_messages"
CHAT_FIELDS = (*FIELDS, NEGATIVE_MESSAGES)

PLANNED = ("guidance_start", "guidance_end", "guidance_top_k", "guidance_streams")
"""Fields of the contract that this version does not serve yet: refused, never ignored."""

CARRIERS = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")
"""Objects in which guidance fields get lost or pass unchecked: refused there."""

SYSTEM_ROLES = ("system", "developer")

MAX_NESTING = 100
"""Objects and lists inside each other, in a body. vLLM takes JSON schemas of about this depth."""

MAX_FIELDS = 256
"""Of a body, and of an object in it that is searched for misspelt fields. vLLM knows about 100."""

MAX_NAME_CHARS = 64
"""Longer names are like none of ours."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # linear also where a string has no end
_STEP = [0] * 256
for _bracket in b"[{":
    _STEP[_bracket] = 1
for _bracket in b"]}":
    _STEP[_bracket] = -1
_NOT_BRACKETS = bytes(byte for byte in range(256) if not _STEP[byte])

_LONG_INTEGER = re.compile(rb"\d{19}")


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """What one HTTP request says about guidance. At most one of the three negatives is set.

    Made by `read_guidance`, which checks; crosses from the ingress to the replica.
    """

    params: GuidanceParams
    negative_messages: list[Any] | None = None

    @property
    def scale(self) -> float:
        return self.params.scale

    @property
    def enabled(self) -> bool:
        """False at scale 1: the request is served as a plain one, without a follower."""
        return self.params.enabled

    @property
    def negative_field(self) -> str | None:
        """The field that brought the negative; None if it starts at the prompt's last token."""
        if self.negative_messages is not None:
            return NEGATIVE_MESSAGES
        if self.params.negative_prompt is not None:
            return NEGATIVE_TEXT
        return NEGATIVE_IDS if self.params.negative_prompt_token_ids is not None else None


# --- bodies ---------------------------------------------------------------------------------------


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, or RequestError. Its numbers are finite, its integers fit 64 bits (a scale may be
    larger), its text is whole characters: vLLM takes all three for granted. It is nested MAX_NESTING deep at most, so
    that whoever walks it, pickling included, may recurse; and has MAX_FIELDS fields at most."""
    non_finite: list[str] = []
    _refuse_deep_nesting(raw)
    try:
        body = json.loads(raw, parse_float=_float(non_finite), parse_constant=_float(non_finite))
    except RecursionError:
        raise RequestError("The body is nested too deeply: send a flat JSON object.") from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RequestError(f"The body must be a JSON object, not {_json_type(body)}.")
    if len(body) > MAX_FIELDS:
        raise RequestError(f"The body has {len(body)} fields: send at most {MAX_FIELDS}.")
    if non_finite:
        _refuse_non_finite(body, non_finite[0])
    if _LONG_INTEGER.search(raw):
        _refuse_huge_integers(body)
    if b"\\ud" in raw.lower():
        _refuse_lone_surrogates(body)
    return body


def _refuse_deep_nesting(raw: bytes) -> None:
    """Before parsing: the parser recurses. Counts brackets outside of strings; malformed JSON is for the parser."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    brackets = _STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_NESTING:
        raise RequestError(f"The body is nested more than {MAX_NESTING} deep: send a flatter JSON object.")


def _float(non_finite: list[str]) -> Callable[[str], float]:
    """`float`, which also notes the literals that are not finite (NaN, Infinity, 1e999)."""

    def parse(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            non_finite.append(literal)
        return value

    return parse


def _refuse_non_finite(body: dict[str, Any], literal: str) -> NoReturn:
    """Name the guidance field at fault, if one is; else the literal."""
    for name, value in body.items():
        if looks_like_guidance(name) and isinstance(value, float):
            check_scale(value)
    raise RequestError(f"{literal[:20]} is not a finite number: JSON knows no NaN and no infinity.")


def _refuse_huge_integers(body: dict[str, Any]) -> None:
    rest = [value for name, value in body.items() if not looks_like_guidance(name)]
    while rest:
        value = rest.pop()
        if isinstance(value, dict | list):
            rest.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise RequestError(f"{str(value)[:20]}... is too large: integers must fit 64 bits.")


def _refuse_lone_surrogates(body: dict[str, Any]) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The body holds half of a surrogate pair (\\ud800 to \\udfff): send whole characters."
        raise RequestError(message) from None


# --- guidance fields ------------------------------------------------------------------------------


def read_guidance(body: Mapping[str, Any], endpoint: Endpoint) -> Guidance | None:
    """The guidance that a request body asks for; None if it says nothing about it.

    Raises GuidanceError for everything that contract 5.2 refuses and that can be told without the
    model: the length of a negative, and whether the group fits the KV pool, is checked in the replica.
    """
    known = CHAT_FIELDS if endpoint == "chat" else FIELDS
    _refuse_hidden_fields(body)
    _refuse_misspelt_processors(body)
    for name in body:
        if (looks_like_guidance(name) and SYNONYMS.get(name, name) not in known) or near_miss(name):
            raise _unknown(name, known)
    messages = body.get(NEGATIVE_MESSAGES)
    params = GuidanceParams.from_fields({name: value for name, value in body.items() if name != NEGATIVE_MESSAGES})
    if messages is not None:
        params = params or GuidanceParams()
        _check_negative_messages(messages, params)
    if params is None:
        return None
    guidance = Guidance(params=params, negative_messages=messages)
    if guidance.enabled:
        _refuse_unguidable(body)
    return guidance


@lru_cache(maxsize=4096)
def near_miss(name: str) -> bool:
    """True for a misspelt guidance field, such as `guidence_scale`: vLLM would ignore it in silence."""
    return not looks_like_guidance(name) and bool(_near(name, CHAT_FIELDS))


def _near(name: str, known: Sequence[str]) -> list[str]:
    if len(name) > MAX_NAME_CHARS:
        return []
    return difflib.get_close_matches(name, known, cutoff=0.85)


def _unknown(name: str, known: Sequence[str]) -> GuidanceError:
    if name in PLANNED:
        return GuidanceError(f"{name} is not supported yet by this server: leave it out.", name)
    if name == NEGATIVE_MESSAGES:
        return GuidanceError(f"{name} belongs to /v1/chat/completions: send {NEGATIVE_TEXT} here.", name)
    return unknown_field(name, known)


def _check_negative_messages(messages: object, params: GuidanceParams) -> None:
    name = NEGATIVE_MESSAGES
    if not isinstance(messages, list):
        raise GuidanceError(f"{name} must be a list of messages, not {_json_type(messages)}.", name)
    if not messages:
        hint = "leave the field out to let the negative stream start at the prompt's last token"
        raise GuidanceError(f"{name} is empty: {hint}.", name)
    if params.has_negative:
        other = NEGATIVE_TEXT if params.negative_prompt is not None else NEGATIVE_IDS
        raise GuidanceError(f"{name} and {other} are both given: send only one of them.", name)
    if not params.enabled:
        hint = f"set {SCALE} above 1 (1.5 is a common start), or leave {name} out"
        raise GuidanceError(f"{SCALE} is 1 (off), so {name} would have no effect: {hint}.", SCALE)


def _refuse_hidden_fields(body: Mapping[str, Any]) -> None:
    """Guidance or processors inside another object would be ignored by vLLM, or reach the engine unchecked."""
    for carrier in CARRIERS:
        for name in carried(body, carrier):
            if looks_like_guidance(name) or name == LOGITS_PROCESSORS:
                raise GuidanceError(f"{name} stands inside {carrier}: move it to the top level of the body.", carrier)


def carried(body: Mapping[str, Any], carrier: str) -> Mapping[str, Any]:
    """The object of that name in the body; empty if there is none. Raises RequestError if it has too many fields."""
    inner = body.get(carrier)
    if not isinstance(inner, Mapping):
        return {}
    if len(inner) > MAX_FIELDS:
        raise RequestError(f"{carrier} has {len(inner)} fields: send at most {MAX_FIELDS}.", carrier)
    return inner


def _refuse_misspelt_processors(body: Mapping[str, Any]) -> None:
    """vLLM would ignore the field, and the request would run without them."""
    for name in body.keys() - {LOGITS_PROCESSORS}:
        if _near(name, [LOGITS_PROCESSORS]):
            raise RequestError(f"{name} is not a field of this server. Did you mean {LOGITS_PROCESSORS}?", name)
    if body.get("use_beam_search") and body.get(LOGITS_PROCESSORS) is not None:
        raise RequestError(f"Beam search knows no {LOGITS_PROCESSORS}: leave one of the two out.", LOGITS_PROCESSORS)


def _refuse_unguidable(body: Mapping[str, Any]) -> None:
    """Request options under which a joint step has no meaning."""
    if body.get("use_beam_search"):
        raise GuidanceError("Beam search cannot be guided: leave use_beam_search out, or guidance.", "use_beam_search")
    if body.get("suffix") is not None:
        raise GuidanceError("A completion with a suffix cannot be guided: leave suffix out, or guidance.", "suffix")
    if body.get("prompt_embeds") is not None:
        raise GuidanceError("prompt_embeds cannot be guided: send prompt as text or token ids.", "prompt_embeds")


# --- the negative stream as a request -------------------------------------------------------------


def negative_body(body: Mapping[str, Any], guidance: Guidance) -> dict[str, Any]:
    """The body of the request whose prompt is the negative stream, for the same endpoint.

    Everything but the prompt or the messages stays, so that vLLM renders the negative exactly as it
    would render a positive one (template options, tools, special tokens). Only for a negative given as
    text or as messages. Token ids that another server rendered (`kv_transfer_params`) are the prompt's.
    """
    body = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if guidance.negative_messages is not None:
        return {**body, "messages": guidance.negative_messages}
    text = guidance.params.negative_prompt
    assert text is not None, "token ids need no rendering"
    if "messages" in body:
        return {**body, "messages": negative_conversation(body["messages"], text)}
    return {**body, "prompt": text}


def negative_conversation(messages: object, negative_prompt: str) -> list[Any]:
    """`messages` with `negative_prompt` as its system message, put in front if there is none.

    Only the first system (or developer) message is replaced; it keeps its role.
    """
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, not {_json_type(messages)}.", "messages")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    at = next((i for i, role in enumerate(roles) if role in SYSTEM_ROLES), None)
    if at is None:
        return [{"role": "system", "content": negative_prompt}, *messages]
    return [*messages[:at], {"role": roles[at], "content": negative_prompt}, *messages[at + 1 :]]


# --- what goes back -------------------------------------------------------------------------------


def guidance_report(guidance: Guidance, negative_prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The `guidance` object beside `usage`. Every output token of a guided request is guided.

    A request that sends scale 1 gets the object too, and reads in it that nothing was guided.
    """
    if not guidance.enabled:
        return {"scale": guidance.scale, "streams": 1, "negative_prompt_tokens": 0, "guided_tokens": 0}
    return {
        "scale": guidance.scale,
        "streams": 2,
        "negative_prompt_tokens": negative_prompt_tokens,
        "guided_tokens": output_tokens,
    }


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
