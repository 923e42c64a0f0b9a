"""Cohere's /v2/embed, as its clients and vLLM have it: reads bodies, and makes answers.

Imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Output, RequestOptions
from cfg_core.prefill_only.vector_formats import Number
from deployments.requests.body import json_type
from deployments.requests.encode.answer_formats import AnswerFormat, NumberFormat, new_id, numbers
from deployments.requests.encode.field_checks import (
    check_number,
    read_dimensions,
    read_texts,
    read_truncation,
    read_whole_number,
)
from deployments.requests.encode.jobs import EncodeCall, EncodeJob
from deployments.requests.encode.prompts import read_input_type

TYPES = ("float", "base64", "int8", "uint8", "binary", "ubinary")


def read_embed(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /v2/embed. Inputs that are too long are cut, unless `truncate` is NONE."""
    field, texts = _texts(body)
    options = RequestOptions(
        prompt=read_input_type(body, info),
        dimensions=read_dimensions(body, info, "output_dimension"),
        normalize=True,
        **_truncation(body, info),
    )
    types = _types(body, options, info)
    return EncodeJob(
        calls=(EncodeCall(inputs=texts, options=options, field=field),),
        answer=answer(types, texts, info.int8_range),
    )


def _texts(body: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The field with the inputs, and its texts."""
    given = [name for name in ("texts", "images", "inputs") if body.get(name) is not None]
    if given == ["texts"] and isinstance(body["texts"], list):
        return "texts", read_texts(body, "texts")
    if given == ["inputs"] and isinstance(body["inputs"], list):
        return "inputs", read_texts(body, "inputs", _content)
    if "images" in given:
        raise RequestError("this model reads no images: send texts.", "images")
    if len(given) == 2:
        raise RequestError("texts and inputs are both given: send only one.", "texts")
    raise RequestError("texts is missing or no list: send a list of texts.", "texts")


def _content(item: object, place: str, name: str) -> str:
    """The text of an entry of `inputs`: an object with one part of the type text, or several."""
    parts = item.get("content") if isinstance(item, Mapping) else None
    if not isinstance(parts, list) or not parts:
        raise RequestError(f'{place} must be {{"content": [{{"type": "text", ...}}]}}.', name)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str) or not text or part.get("type") != "text":
            raise RequestError(f"{place} holds a part that is no text: send texts only.", name)
    return "\n".join(map(str, texts))


def _types(body: Mapping[str, Any], options: RequestOptions, info: ModelInfo) -> tuple[str, ...]:
    name = "embedding_types"
    types = body.get(name)
    if types is None:
        return ("float",)
    if not isinstance(types, list) or not types or not all(kind in TYPES for kind in types):
        raise RequestError(f"{name} must be a list of some of {', '.join(TYPES)}.", name)
    for kind in types:
        if kind not in ("float", "base64"):
            check_number(kind, options, info, name)
    return tuple(dict.fromkeys(types))


def _truncation(body: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    wish = body.get("truncate")
    if wish is not None and (
        not isinstance(wish, str) or wish.upper() not in ("NONE", "START", "END")
    ):
        shown = repr(wish)[:40] if isinstance(wish, str) else json_type(wish)
        raise RequestError(f"truncate is {shown}: send NONE, START or END.", "truncate")
    asked = read_truncation({"truncate": wish or "END"}, info)
    most = read_whole_number(body, "max_tokens", lowest=1)
    if most is None or not asked:
        return asked
    return {**asked, "truncate_to": min(most, info.max_input_tokens)}


# --- the answer -----------------------------------------------------------------------------------


def answer(types: Sequence[str], texts: Sequence[str], int8_range: float | None) -> AnswerFormat:
    """The answer of Cohere's /v2/embed: a list of vectors for each type that was asked for.

    texts: the texts, which are sent back.
    """
    forms = {name: _cohere_form(name, int8_range) for name in types}
    size = sum(form.bytes_per_value for form in forms.values())
    return AnswerFormat(_write_cohere, (forms, texts), size, sum(map(len, texts)))


def _cohere_form(name: str, int8_range: float | None) -> NumberFormat:
    if name in ("float", "base64"):
        return NumberFormat(as_base64=name == "base64")
    return NumberFormat(cast("Number", name), int8_range=int8_range)


def _write_cohere(
    forms: dict[str, NumberFormat], texts: Sequence[str], outputs: Sequence[Output]
) -> dict[str, Any]:
    vectors = {
        name: [numbers(output.values["embed"], form) for output in outputs]
        for name, form in forms.items()
    }
    num_tokens = sum(output.num_tokens for output in outputs)
    return {
        "id": new_id("embd"),
        "embeddings": vectors,
        "texts": list(texts),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
        "response_type": "embeddings_by_type",
    }
