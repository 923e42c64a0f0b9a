"""JSON schemas as grammars: the same schema in one order of keys, and without further properties.

Standard library only. Both functions take time proportional to the size of the schema, and return
new values. Callers bound its depth first (bounds.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are objects of schemas."""

_SCHEMAS = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "prefixItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    }
)
"""Keywords whose values are schemas, or lists of schemas."""

_COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas"})
_NAMED = ("properties", "patternProperties")
_SAID = ("additionalProperties", "unevaluatedProperties")


def canonical(schema: Any) -> Any:
    """The schema with its keywords in alphabetical order.

    The order of entries inside `properties` stays, because answers have their properties in this
    order. So do the keys of values that are no schemas, such as a `const`.
    """
    if not isinstance(schema, dict):
        return schema
    return {key: _inner(key, schema[key], canonical) for key in sorted(schema, key=str)}


def closed(schema: Any, stays_open: bool = False) -> Any:
    """The schema with `additionalProperties: false` in each object that names its properties.

    Objects that are combined with other schemas stay open, because the properties of one part would
    be forbidden in the other. So do objects that say themselves what else they allow.

    stays_open: whether `schema` is a part of such an object.
    """
    if not isinstance(schema, dict):
        return schema
    names = any(isinstance(schema.get(key), dict) for key in _NAMED)
    part = partial(closed, stays_open=True) if names else closed
    ours = {
        key: _inner(key, value, part if key in _COMBINED else closed)
        for key, value in schema.items()
    }
    said = any(key in schema for key in (*_COMBINED, *_SAID))
    if names and not said and not stays_open:
        ours["additionalProperties"] = False
    return ours


def _inner(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with `change` applied to the schemas in it."""
    if key in _MAPS and isinstance(value, Mapping):
        return {name: change(inner) for name, inner in value.items()}
    if key in _SCHEMAS:
        return [change(inner) for inner in value] if isinstance(value, list) else change(value)
    return value


def canonical_text(kind: str, text: str) -> str:
    """A schema or a structural tag with its keywords in one order. kind: a key of CANONICAL.

    What is no JSON is left to the compiler, which says what is wrong with it.
    """
    try:
        return json.dumps(CANONICAL[kind](json.loads(text)))
    except (ValueError, RecursionError):
        return text


def canonical_tag(tag: Any) -> Any:
    """A structural tag, with the schemas in it in their canonical order."""
    if isinstance(tag, list):
        return [canonical_tag(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        key: canonical(tag[key]) if key in ("json_schema", "schema") else canonical_tag(tag[key])
        for key in sorted(tag, key=str)
    }


CANONICAL = {"json": canonical, "structural_tag": canonical_tag}
"""What brings a field of `structured_outputs` into one order of keywords."""
