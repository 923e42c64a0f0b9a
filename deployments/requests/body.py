"""A request's body: JSON that whoever comes after it may take for granted. Pure; imports neither
vllm nor ray."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn

from cfg_core.errors import RequestError
from cfg_core.params import check_scale, looks_like_guidance

MAX_NESTING = 100
"""Objects and lists inside each other, in a body. vLLM takes JSON schemas of about this depth."""

MAX_FIELDS = 256
"""Of a body, and of an object in it that is searched for misspelt fields. vLLM knows about 100."""

_STRING = re.compile(
    rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL
)  # linear also where a string has no end
_STEP = [0] * 256
for _bracket in b"[{":
    _STEP[_bracket] = 1
for _bracket in b"]}":
    _STEP[_bracket] = -1
_NOT_BRACKETS = bytes(byte for byte in range(256) if not _STEP[byte])

_LONG_INTEGER = re.compile(rb"\d{19}")


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, or RequestError. Its numbers are finite, its integers fit 64 bits
    (a scale may be larger), its text is whole characters: vLLM takes all three for granted. It is
    nested MAX_NESTING deep at most, so that whoever walks it, pickling included, may recurse; and
    has MAX_FIELDS fields at most."""
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
    if _LONG_INTEGER.search(raw):
        _refuse_huge_integers(body)
    if b"\\ud" in raw.lower():
        _refuse_lone_surrogates(body)
    return body


def _refuse_deep_nesting(raw: bytes) -> None:
    """Before parsing: the parser recurses. Counts brackets outside of strings; malformed JSON is
    for the parser."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    brackets = _STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_NESTING:
        raise RequestError(
            f"The body is nested more than {MAX_NESTING} deep: send a flatter JSON object."
        )


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
        message = (
            "The body holds half of a surrogate pair (\\ud800 to \\udfff): send whole characters."
        )
        raise RequestError(message) from None


def json_type(value: object) -> str:
    """What a value is called in a message."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
