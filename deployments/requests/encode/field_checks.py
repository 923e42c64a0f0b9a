"""Pure functions that each read and check one field of an encoder's request body.

Each raises a RequestError that names the field and says what to send instead. A value of None means
"not given". Booleans do not count as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Input, RequestOptions
from cfg_core.prefill_only.vector_formats import BITS, BYTES, NUMBERS, Number, check_bits
from deployments.requests.body import json_type
from deployments.requests.encode.answer_formats import NumberFormat

SMALL: tuple[Number, ...] = (*BYTES, *BITS)
MAX_ITEMS = 2048
"""Maximum number of inputs, documents or texts in one request."""


# --- inputs ---------------------------------------------------------------------------------------


def read_inputs(value: object, name: str = "input", pairs: bool = False) -> list[Input]:
    """`value` as a list of inputs.

    value: a text, a list of texts, token ids, or a list of lists of token ids.
    name: the field, for errors.
    pairs: whether a list of pairs (lists of two texts) is allowed, too.
    """
    forms = "a text, a list of texts, or token ids"
    if value is None:
        raise RequestError(f"{name} is missing: send {forms}.", name)
    if not isinstance(value, str | list):
        raise RequestError(f"{name} is {json_type(value)}: send {forms}.", name)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    items = [value] if isinstance(value, str) else value
    check_count(items, name)
    places = [f"{name}[{i}]" for i in range(len(items))] if isinstance(value, list) else [name]
    kinds = [_kind(item, place, name, pairs) for item, place in zip(items, places, strict=True)]
    if other := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0):
        mixed = f"{name}[0] is {kinds[0]} and {name}[{other}] is {kinds[other]}"
        raise RequestError(f"{mixed}: send one kind in a request.", name)
    return [
        tuple(item) if kind == "a pair" else item for item, kind in zip(items, kinds, strict=True)
    ]


def _kind(item: object, place: str, name: str, pairs: bool) -> str:
    """The kind of input that `item` is.

    place: where it is, as in `input[3]`. name: the field.
    Raises RequestError if it is no input.
    """
    if isinstance(item, str):
        _refuse_empty(item, place, name)
        return "a text"
    if not isinstance(item, list):
        raise RequestError(
            f"{place} is {json_type(item)}: send texts, or lists of token ids.", name
        )
    if not item:
        raise RequestError(f"{place} has no tokens: send at least one token id.", name)
    if all(type(token) is int for token in item):
        return "a list of token ids"
    if pairs and len(item) == 2 and all(isinstance(text, str) for text in item):
        for text in item:
            _refuse_empty(text, place, name)
        return "a pair"
    wrong = next(token for token in item if type(token) is not int)
    hint = (
        "token ids are whole numbers, and a pair is two texts"
        if pairs
        else "token ids are whole numbers"
    )
    raise RequestError(f"{place} holds {json_type(wrong)}: {hint}.", name)


def read_texts(
    body: Mapping[str, Any], name: str, text_of: Callable[[object, str, str], str] | None = None
) -> list[str]:
    """The texts in a field that holds a text or a list of texts.

    text_of: reads one item of a list, called with item, place and name; by default the item must be
    a text.
    """
    value = body.get(name)
    if value is None:
        raise RequestError(f"{name} is missing: send a text, or a list of texts.", name)
    if isinstance(value, str):
        return [_checked_text(value, name, name)]
    if not isinstance(value, list):
        raise RequestError(f"{name} is {json_type(value)}: send a text, or a list of texts.", name)
    check_count(value, name)
    return [(text_of or _checked_text)(item, f"{name}[{i}]", name) for i, item in enumerate(value)]


def read_document(item: object, place: str, name: str) -> str:
    """The text of a document, which is a text or an object with a `text`."""
    text = item.get("text") if isinstance(item, Mapping) else item
    if not isinstance(text, str):
        what = "an object without a text" if isinstance(item, Mapping) else json_type(item)
        raise RequestError(f'{place} is {what}: send a text, or {{"text": ...}}.', name)
    return _checked_text(text, place, name)


def read_text(body: Mapping[str, Any], name: str) -> str:
    if body.get(name) is None:
        raise RequestError(f"{name} is missing: send a text.", name)
    return _checked_text(body[name], name, name)


def _checked_text(item: object, place: str, name: str) -> str:
    if not isinstance(item, str):
        raise RequestError(f"{place} is {json_type(item)}: send a text.", name)
    _refuse_empty(item, place, name)
    return item


def _refuse_empty(text: str, place: str, name: str) -> None:
    if not text:
        raise RequestError(f"{place} is empty: send text, or leave that item out.", name)


def check_count(items: Sequence[object], name: str) -> None:
    """Raise RequestError if there are no items, or more than MAX_ITEMS."""
    if not items:
        raise RequestError(f"{name} is empty: send 1 to {MAX_ITEMS} items.", name)
    if len(items) > MAX_ITEMS:
        raise RequestError(
            f"{name} has {len(items)} items: send at most {MAX_ITEMS} in one request.", name
        )


# --- options --------------------------------------------------------------------------------------


def read_truncation(body: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The truncation of inputs, as fields of RequestOptions; empty if none is asked for.

    Reads `truncate_prompt_tokens` (vLLM) or `truncate` (TEI: true or false; Cohere: NONE, START or
    END).
    """
    limit, side = body.get("truncate_prompt_tokens"), _side(body)
    wish = body.get("truncate")
    if limit is not None and wish is not None:
        message = "truncate and truncate_prompt_tokens are both given: send only one of them."
        raise RequestError(message, "truncate")
    if limit is not None:
        return {"truncate_to": _limit(limit, info), "truncation_side": side}
    wish = wish.upper() if isinstance(wish, str) else wish
    if wish not in (None, False, True, "NONE", "START", "END") or type(wish) in (int, float):
        raise RequestError(
            "truncate must be true or false, or NONE, START or END (as Cohere).", "truncate"
        )
    if wish in (None, False, "NONE"):
        return {}
    return {
        "truncate_to": info.max_input_tokens,
        "truncation_side": "left" if wish == "START" else side,
    }


def _limit(limit: object, info: ModelInfo) -> int:
    name, most = "truncate_prompt_tokens", info.max_input_tokens
    if type(limit) is not int or not (limit == -1 or 1 <= limit <= most):
        raise RequestError(
            f"{name} must be 1 to {most}, or -1 for the most that this model takes.", name
        )
    return most if limit == -1 else limit


def _side(body: Mapping[str, Any]) -> str:
    """The side that is cut off, from `truncation_side` (vLLM) or `truncation_direction` (TEI)."""
    for name in ("truncation_side", "truncation_direction"):
        side = body.get(name)
        if side is None:
            continue
        if not isinstance(side, str) or side.lower() not in ("left", "right"):
            raise RequestError(f"{name} must be left or right.", name)
        return side.lower()
    return "right"


def read_dimensions(
    body: Mapping[str, Any], info: ModelInfo, name: str = "dimensions"
) -> int | None:
    wanted = read_whole_number(body, name, lowest=1)
    if wanted is None or wanted == info.dimension:
        return None
    info.check_dimensions(wanted, name)
    return wanted


def read_activation(body: Mapping[str, Any]) -> bool | None:
    """Whether to normalize vectors and to apply the activation to scores; None if not given.

    Reads `use_activation` (vLLM) or `normalize`.
    """
    names = [name for name in ("use_activation", "normalize") if body.get(name) is not None]
    values = [read_flag(body, name) for name in names]
    if len(set(values)) == 2:
        raise RequestError(
            "use_activation and normalize mean the same, but have different values: send only one.",
            "normalize",
        )
    return values[0] if values else None


def read_format(body: Mapping[str, Any], info: ModelInfo) -> NumberFormat:
    """How numbers are sent, by `encoding_format` and `embed_dtype` (or `output_dtype`).

    `encoding_format` may also be the type of the numbers, as in `int8`.
    """
    name = "encoding_format"
    encoding = body.get(name) or "float"
    if encoding not in ("float", "base64", *SMALL):
        raise RequestError(f"{name} must be float or base64, or one of {', '.join(SMALL)}.", name)
    asked: set[Number] = {number for number in SMALL if number == encoding}
    for other in ("embed_dtype", "output_dtype"):
        if (value := body.get(other)) is not None:
            if value not in ("float", *NUMBERS):
                raise RequestError(f"{other} must be one of {', '.join(NUMBERS)}.", other)
            asked.add("float32" if value == "float" else value)
    if len(asked) > 1:
        raise RequestError(
            f"{name} and embed_dtype ask for {' and '.join(sorted(asked))}: send only one.", name
        )
    return NumberFormat(next(iter(asked), "float32"), encoding == "base64", info.int8_range)


def check_number(number: Number, options: RequestOptions, info: ModelInfo, name: str) -> None:
    """Raise RequestError for a format that the dense vectors of a request cannot have."""
    if number in BITS:
        check_bits(options.dimensions or info.dimension or 0, name)
    if number in BYTES and options.normalize is False:
        raise RequestError(
            "int8 and uint8 have a scale for normalised vectors: leave normalize out.", name
        )


def read_flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {json_type(value)}: send true or false.", name)
    return value


def read_whole_number(body: Mapping[str, Any], name: str, lowest: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < lowest:
        shown = value if type(value) is int else json_type(value)
        raise RequestError(f"{name} is {shown}: send a whole number of at least {lowest}.", name)
    return value
