"""Decode the JSON body of a request, and check what all later code takes for granted.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn

from cfg_core.errors import RequestError
from cfg_core.params import check_scale, looks_like_guidance

MAX_NESTING = 100
"""Maximum nesting depth of objects and lists in a body.

vLLM accepts JSON schemas of about this depth.
"""

MAX_FIELDS = 256
"""Maximum number of fields of a body, and of an object in it whose field names are checked.

vLLM knows about 100 fields.
"""

_STEP = [0] * 256
for _bracket in b"[{":
    _STEP[_bracket] = 1
for _bracket in b"]}":
    _STEP[_bracket] = -1
_NOT_BRACKETS = bytes(byte for byte in range(256) if not _STEP[byte])

_LONG_INTEGER = b"0" * 19
_AS_ZEROS = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
_PIECE_BYTES = 1 << 20


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, checked.

    Its numbers are finite, its integers fit 64 bits (guidance fields are checked elsewhere), and
    its text has no half of a surrogate pair: vLLM takes all three for granted. It is nested at most
    MAX_NESTING deep, so that code which walks it may recurse, pickling included. It has at most
    MAX_FIELDS fields.

    Raises RequestError if there is no object, or if it fails a check.
    """
    non_finite: list[str] = []
    _refuse_deep_nesting(raw)
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
    if b"\\ud" in raw or b"\\uD" in raw:
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


def _refuse_deep_nesting(raw: bytes) -> None:
    """Raise RequestError if `raw` is nested too deeply.

    Called before parsing, because the parser recurses. Counts the brackets outside of strings.
    Malformed JSON is left to the parser.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    # Without escapes, every second part is a string. A regular expression would keep all other
    # threads waiting: two seconds for 100 MB.
    parts = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    brackets = b"".join(parts[::2]).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_NESTING:
        raise RequestError(
            f"The body is nested more than {MAX_NESTING} deep: send a flatter JSON object."
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
            check_scale(value)
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
