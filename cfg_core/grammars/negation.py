"""A JSON schema of what another one forbids, where that can be written (standard library only)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from cfg_core.grammars.keywords import asserted
from cfg_core.grammars.patterns import other_than, unreadable
from cfg_core.grammars.schemas import MAPS

Parts = list[Any]

_TYPES = ("null", "boolean", "string", "array", "object")
COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)


def negated(schema: Any) -> Any:
    """A schema of values that `schema` forbids, or None if it cannot be written.

    It may leave out some of them, such as fractions where `schema` is of integers. It never allows
    a value that `schema` allows.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    ways = [_negations(key, schema[key]) for key in asserted(schema)]
    if any(way is None for way in ways):
        return None
    every = [way for several in ways for way in several or ()]
    return every[0] if len(every) == 1 else {"anyOf": every} if every else False


def _negations(key: str, value: Any) -> Parts | None:
    """The ways not to satisfy one keyword."""
    if is_invalid(key, value):
        return None
    if key in _OPPOSITE:
        type_, opposite, more = _OPPOSITE[key]
        return [{"type": type_, opposite: value + more}] if value + more >= 0 or not more else []
    match key:
        case "type":
            return _other_types(value)
        case "const":
            return _none_of([value])
        case "enum":
            return _none_of(value)
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            return _wrong_properties(value)
        case "not":
            return [value]
        case "allOf":
            return _all_or_none([negated(one) for one in value])
        case "anyOf":
            several = _all_or_none([negated(one) for one in value])
            return None if several is None else [{"allOf": several}]
    return None


_OPPOSITE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


def _all_or_none(several: Parts) -> Parts | None:
    return None if any(one is None for one in several) else several


def _other_types(value: Any) -> Parts:
    given = [value] if isinstance(value, str) else value
    others = [name for name in _TYPES if name not in given]
    numbers = [] if {"number", "integer"} & set(given) else ["number"]
    return [{"type": [*others, *numbers]}] if others or numbers else []


def _wrong_properties(named: Mapping[str, Any]) -> Parts | None:
    opposites = {name: negated(one) for name, one in named.items()}
    if any(opposite is None for opposite in opposites.values()):
        return None
    return [
        {"type": "object", "required": [name], "properties": {name: opposite}}
        for name, opposite in opposites.items()
        if opposite is not False
    ]


def _none_of(values: list[Any]) -> Parts | None:
    """The values of all types but these."""
    if any(isinstance(value, dict | list) for value in values):
        return None
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({v for v in values if isinstance(v, int | float) and not isinstance(v, bool)})
    flags = [flag for flag in (True, False) if not any(flag is value for value in values)]
    free = ["array", "object", *([] if None in values else ["null"])]
    return [
        {"type": free},
        *([{"enum": flags}] if flags else ()),
        {"type": "string", **({"pattern": other_than(texts)} if texts else {})},
        *_between(numbers),
    ]


def _between(numbers: list[float]) -> Parts:
    """Schemas of all numbers but these, which are in ascending order."""
    if not numbers:
        return [{"type": "number"}]
    return [
        {"type": "number", "exclusiveMaximum": numbers[0]},
        *(
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(numbers)
        ),
        {"type": "number", "exclusiveMinimum": numbers[-1]},
    ]


def is_invalid(key: str, value: Any) -> bool:
    """Whether no compiler can read this value of a keyword."""
    if key == "type":
        names = value if isinstance(value, list) else [value]
        known = (*_TYPES, "number", "integer")
        return not names or any(name not in known for name in names)
    if key in _OPPOSITE or key in COUNTS or key == "multipleOf":
        return isinstance(value, bool) or not isinstance(value, int | float)
    if key in ("enum", "required", "allOf", "anyOf", "oneOf", "prefixItems"):
        return not isinstance(value, list) or not value
    if key == "pattern":
        return not isinstance(value, str) or unreadable(value) or not _compiles(value)
    return key in MAPS and not isinstance(value, dict)


def _compiles(pattern: str) -> bool:
    """Whether brackets and repetitions of a pattern are right. Python's dialect is close enough."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(re.sub(r"\\[pP]\{[^}]*\}|\\u\{[^}]*\}", "x", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return True
