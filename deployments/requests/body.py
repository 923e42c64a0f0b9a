"""Decode the JSON body of a request, and check what all later code takes for granted.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from cfg_core.errors import RequestError
from cfg_core.params import looks_like_guidance
from cfg_core.params.checks import check_scale
from cfg_core.params.fields import SYNONYMS
from deployments.requests.shape import READ_ONCE, Shape, ShapeBounds, shape_of

Copies = Callable[[dict[str, Any]], tuple[int, str]]
"""How often the fields of a body are copied, and for each of what, in the plural."""

DEFAULT_BOUNDS = ShapeBounds()

MAX_NESTING = 100
"""Maximum nesting depth of objects and lists in a body.

vLLM accepts JSON schemas of about this depth.
"""

MAX_FIELDS = 256
"""Maximum number of fields of a body, and of an object in it whose field names are checked.

vLLM knows about 100 fields.
"""

SMALL_BYTES, SMALL_COPIED_BYTES = 2**16, 2**13
"""A body of so many bytes, and one of so many bytes times the copies of its fields, is within the
default bounds, whatever it holds. Its shape is not read."""

_FIRST_OF_SURROGATES = b"\xed"
_LONG_INTEGER = b"0" * 19
_AS_ZEROS = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
_PIECE_BYTES = 1 << 20


def decode_body(
    raw: bytes, bounds: ShapeBounds = DEFAULT_BOUNDS, copies: Copies | None = None
) -> dict[str, Any]:
    """The JSON object in `raw`, checked.

    Its numbers are finite, its integers fit 64 bits (guidance fields are checked elsewhere), and
    its text has no half of a surrogate pair: vLLM takes all three for granted. It is nested at most
    MAX_NESTING deep, so that code which walks it may recurse, pickling included. It has at most
    MAX_FIELDS fields, and its shape is within the bounds.

    Raises RequestError if there is no object, or if it fails a check.

    copies: of the decoded body, how often its fields are copied, and for what; None: they are not.
    """
    _refuse_other_encodings(raw)
    shape = _checked_shape(raw, bounds)
    body = _parsed(raw)
    if copies is not None:
        number, of = copies(body)
        if number * len(raw) > SMALL_COPIED_BYTES:
            bounds.check_copies(shape or shape_of(raw), number, of, but=READ_ONCE)
    return body


def _refuse_other_encodings(raw: bytes) -> None:
    """Raise RequestError if `raw` is in UTF-16 or UTF-32, or not in UTF-8 where it looks so.

    JSON is UTF-8 (RFC 8259). Python would guess the others, and would also read halves of surrogate
    pairs that are written as UTF-8.
    """
    try:
        if b"\0" in raw[:4] or raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError
        if _FIRST_OF_SURROGATES in raw:
            raw.decode()
    except ValueError:
        raise RequestError("The body is not valid JSON: it is not in UTF-8.") from None


def _checked_shape(raw: bytes, bounds: ShapeBounds) -> Shape | None:
    """The shape of a body, within the bounds; None if it is so small that it does not matter.

    Called before parsing, because the parser recurses, and keeps all other threads waiting.
    Malformed JSON is left to the parser.
    """
    if len(raw) <= SMALL_BYTES and raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return None
    shape = shape_of(raw)
    if shape.depth > MAX_NESTING:
        raise RequestError(
            f"The body is nested more than {MAX_NESTING} deep: send a flatter JSON object."
        )
    bounds.check_values(shape)
    return shape


def _parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises RequestError if there is none, or if vLLM cannot read it."""
    non_finite: list[str] = []
    try:
        body = json.loads(raw, parse_float=_float(non_finite), parse_constant=_float(non_finite))
    except RecursionError:
        raise RequestError("The body is nested too deeply: send a flat JSON object.") from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RequestError(f"The body must be a JSON object, not {json_type(body)}.")
    if len(body) > MAX_FIELDS:
        raise RequestError(f"The body has {len(body)} fields: send at most {MAX_FIELDS}.")
    if non_finite:
        _refuse_non_finite(body, non_finite[0])
    if _has_long_integer(raw):
        _refuse_huge_integers(body)
    if b"\\" in raw and (b"\\ud" in raw or b"\\uD" in raw):
        _refuse_lone_surrogates(body)
    return body


def _has_long_integer(raw: bytes) -> bool:
    """Whether there are 19 digits in a row.

    Ten times as fast as a regular expression, which would also keep all other threads waiting until
    it has read the whole body: a second for 100 MB.
    """
    overlap = len(_LONG_INTEGER) - 1
    return any(
        _LONG_INTEGER in raw[start : start + _PIECE_BYTES + overlap].translate(_AS_ZEROS)
        for start in range(0, len(raw), _PIECE_BYTES)
    )


def _float(non_finite: list[str]) -> Callable[[str], float]:
    """A `float` that also collects the literals that are not finite (NaN, Infinity, 1e999)."""

    def parse(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            non_finite.append(literal)
        return value

    return parse


def _refuse_non_finite(body: dict[str, Any], literal: str) -> NoReturn:
    """Raise an error that names the guidance field at fault, or the literal if no field is."""
    for name, value in body.items():
        if looks_like_guidance(name) and isinstance(value, float):
            check_scale(value, SYNONYMS.get(name, name))
    raise RequestError(f"{literal[:20]} is not a finite number: JSON has no NaN or infinity.")


def _refuse_huge_integers(body: dict[str, Any]) -> None:
    for name, outer in body.items():
        rest = [] if looks_like_guidance(name) else [outer]
        while rest:
            value = rest.pop()
            if isinstance(value, dict | list):
                rest.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise RequestError(
                    f"{name[:100]} holds {str(value)[:20]}..., which is too large: integers must"
                    " fit 64 bits.",
                    name,
                )


def _refuse_lone_surrogates(body: dict[str, Any]) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = (
            "The body holds half of a surrogate pair (\\ud800 to \\udfff): send whole characters."
        )
        raise RequestError(message) from None


def json_type(value: object) -> str:
    """The name of the value's JSON type, for an error message."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
