"""JSON schemas in one order of keys, and without further properties."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cfg_core.grammars.schemas import canonical, canonical_tag, closed

TEXT = {"type": "string"}


def turned(value: Any) -> Any:
    """The value with the keys of all its objects in reverse order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


def test_keywords_have_one_order_and_properties_keep_theirs():
    schema = {
        "type": "object",
        "required": ["b", "a"],
        "properties": {
            "b": {"type": "array", "items": {"type": "string", "minLength": 1}},
            "a": {},
        },
    }
    again = {"properties": {"b": turned(schema["properties"]["b"]), "a": {}}} | {
        key: schema[key] for key in ("required", "type")
    }
    assert json.dumps(canonical(schema)) == json.dumps(canonical(again))
    assert list(canonical(schema)["properties"]) == ["b", "a"]
    assert canonical(schema) == schema
    assert json.dumps(canonical(schema)) != json.dumps(canonical(turned(schema)))


@pytest.mark.parametrize("keyword", ["const", "enum", "default", "examples", "x-ours"])
def test_values_that_are_no_schemas_stay(keyword: str):
    value = [{"z": 1, "a": 2}]
    assert json.dumps(canonical({keyword: value})[keyword]) == json.dumps(value)


def test_the_schemas_of_a_structural_tag_are_canonical():
    def tag(schema: dict[str, Any]) -> dict[str, Any]:
        return {"format": {"tags": [{"begin": "<a>", "content": {"json_schema": schema}}]}}

    first, second = tag({"type": "string", "maxLength": 3}), tag({"maxLength": 3, "type": "string"})
    assert json.dumps(canonical_tag(first)) == json.dumps(canonical_tag(turned(second)))


NAMED = {"type": "object", "properties": {"a": TEXT}}
CLOSED = NAMED | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        (
            {"patternProperties": {"^a": TEXT}},
            {"patternProperties": {"^a": TEXT}} | {"additionalProperties": False},
        ),
        (NAMED | {"additionalProperties": TEXT}, NAMED | {"additionalProperties": TEXT}),
        (NAMED | {"unevaluatedProperties": True}, NAMED | {"unevaluatedProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"items": NAMED}, {"items": CLOSED}),
        (
            {"$defs": {"x": NAMED}, "$ref": "#/$defs/x"},
            {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"},
        ),
        ({"anyOf": [NAMED, TEXT]}, {"anyOf": [CLOSED, TEXT]}),
        (NAMED | {"anyOf": [NAMED, CLOSED]}, CLOSED | {"anyOf": [NAMED, CLOSED]}),
        (
            {"properties": {"properties": NAMED}},
            {"properties": {"properties": CLOSED}, "type": "object"}
            | {"additionalProperties": False},
        ),
        (True, True),
        ({"const": NAMED}, {"const": NAMED}),
    ],
    ids=repr,
)
def test_objects_that_name_their_properties_are_closed(schema: Any, expected: Any):
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before
