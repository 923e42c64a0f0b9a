"""JSON schemas as grammars: the same schema in one order of keys, and without further properties.

Standard library only. Both functions take time proportional to the size of the schema, and return
new values. Callers bound its depth first (bounds.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

MAPS = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    }
)
"""Keywords whose values are objects of schemas."""

SCHEMAS = frozenset(
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
    return {key: inner(key, schema[key], canonical) for key in sorted(schema, key=str)}


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each object that names its properties.

    Objects that are combined with schemas of further properties stay open, because the properties
    of one part would be forbidden in the other. So do objects that say themselves what else they
    allow. A property that is required and has no schema may have any value.
    """
    return _closed(schema, False, _combined_references(schema))


def _closed(schema: Any, stays_open: bool, combined: frozenset[str], at: str = "#") -> Any:
    """stays_open: whether `schema` is a part of an object. combined: references of such parts."""
    if not isinstance(schema, dict):
        return schema
    names = any(isinstance(schema.get(key), dict) for key in _NAMED)
    open_here = stays_open or at in combined
    open_parts = names or open_here or _is_intersection(schema)

    def change(key: str, value: Any, place: str) -> Any:
        return _closed(value, open_parts and key in _COMBINED, combined, place)

    ours = {
        key: _placed(key, value, partial(change, key), f"{at}/{key}")
        for key, value in schema.items()
    }
    said = any(key in schema for key in _SAID) or _adds_properties(schema)
    if names and not said and not open_here:
        ours["additionalProperties"] = False
        if isinstance(ours.get("properties"), dict):
            ours.setdefault("type", "object")
            wanted = ours.get("required") or ()
            missing = [name for name in wanted if name not in ours["properties"]]
            patterns = ours.get("patternProperties")
            ours["properties"] |= {name: True for name in missing if not patterns}
    return ours


def _adds_properties(schema: Mapping[str, Any]) -> bool:
    """Whether what is combined with an object may name properties that the object does not."""
    given = schema.get("properties")
    own = given if isinstance(given, dict) else {}
    rest = [schema[key] for key in _COMBINED if key in schema]
    if "$ref" in schema:
        return True
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest.extend(node)
        elif isinstance(node, dict):
            named = (node.get("properties") or {}, node.get("required") or ())
            if {"$ref", "patternProperties"} & node.keys() or not own.keys() >= {
                name for names in named for name in names if isinstance(name, str)
            }:
                return True
            rest.extend(node[key] for key in _COMBINED if key in node)
    return False


def _is_intersection(schema: Mapping[str, Any]) -> bool:
    """Whether parts of a schema are joined by `allOf`."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and len(parts) > 1


def _combined_references(schema: Any) -> frozenset[str]:
    """The references of schemas that are joined with others, or stand beside other properties."""
    found, rest = set[str](), [(schema, False)]
    while rest:
        node, joined = rest.pop()
        if isinstance(node, list):
            rest.extend((one, joined) for one in node)
        elif isinstance(node, dict):
            beside = joined or any(isinstance(node.get(key), dict) for key in _NAMED)
            if isinstance(node.get("$ref"), str) and beside:
                found.add(node["$ref"])
            below = beside or _is_intersection(node)
            rest.extend((one, below and key in _COMBINED) for key, one in node.items())
    return frozenset(found)


def inner(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with `change` applied to the schemas in it."""
    return _placed(key, value, lambda schema, _: change(schema), "")


def _placed(key: str, value: Any, change: Callable[[Any, str], Any], at: str) -> Any:
    """As `inner`, for a `change` that is told the place of each schema."""
    if key in MAPS and isinstance(value, Mapping):
        return {name: change(one, f"{at}/{name}") for name, one in value.items()}
    if key in SCHEMAS and isinstance(value, list):
        return [change(one, f"{at}/{i}") for i, one in enumerate(value)]
    return change(value, at) if key in SCHEMAS else value


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
