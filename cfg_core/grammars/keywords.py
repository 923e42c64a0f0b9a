"""What the compilers make of the keywords of a JSON schema (standard library only).

A compiler that does not know a keyword may refuse the schema, or drop the keyword without a word.
llguidance refuses it by name. xgrammar drops it, and also drops what stands beside `anyOf`, `$ref`
and other keywords. So a schema gets xgrammar only if nothing of it is lost there. What is said here
of the two compilers was found by playing the JSON Schema Test Suite and random texts through both;
tests/engine/test_schemas_are_enforced.py repeats that for each keyword.

All functions take time proportional to the size of the schema. Callers bound its depth first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cfg_core.grammars.patterns import looks_around, unreadable
from cfg_core.grammars.schemas import MAPS, SCHEMAS

_LENGTHS = ("minLength", "maxLength", "pattern", "format")
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {
    "string": frozenset(_LENGTHS),
    "number": frozenset(_RANGES),
    "integer": frozenset(_RANGES),
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties"),
            *("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"),
            *("dependentRequired", "dependentSchemas", "dependencies"),
        }
    ),
    "array": frozenset(
        {
            *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
            *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        }
    ),
}
"""The keywords that say something about values of one type, and nothing about others."""

COMBINED = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "anyOf", "allOf", "oneOf", "not", "if"}
)
ASSERTIONS = frozenset().union(*OF_TYPE.values()) | COMBINED | {"type", "enum", "const"}
"""All keywords that forbid something. The others are annotations, also those nobody knows."""

NOT_IN_GUIDANCE = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "dependentRequired"),
        *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that llguidance refuses, unless they can be rewritten (rewriting.py)."""

GUIDANCE_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri", "unknown"),
    }
)
XGRAMMAR_FORMATS = frozenset(
    {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
)
"""Further formats of xgrammar. Other formats are annotations, as JSON Schema allows."""


class UnenforcedKeyword(NamedTuple):
    """A keyword that is not enforced.

    at: JSON pointer to the schema that has it, "" for the whole schema.
    """

    at: str
    keyword: str

    def __str__(self) -> str:
        return f"`{self.keyword}` at {self.at or '/'}"


def subschemas(schema: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside `schema` that is an object, with its JSON pointer, itself first."""
    rest = [(at, schema)]
    while rest:
        at, node = rest.pop()
        if not isinstance(node, dict):
            continue
        yield at, node
        for key, value in node.items():
            here = f"{at}/{_escaped(key)}"
            if key in MAPS and isinstance(value, Mapping):
                rest.extend((f"{here}/{_escaped(name)}", one) for name, one in value.items())
            elif key in SCHEMAS and isinstance(value, list):
                rest.extend((f"{here}/{i}", one) for i, one in enumerate(value))
            elif key in SCHEMAS:
                rest.append((here, value))


def _escaped(name: str) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def types_of(node: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema names, () if it names none."""
    said = node.get("type")
    names = [said] if isinstance(said, str) else said
    return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list) else ()


def asserted(node: Mapping[str, Any]) -> list[str]:
    """The keywords of a schema that forbid something."""
    types = types_of(node)
    return [key for key in node if key in ASSERTIONS and not _says_nothing(key, node, types)]


def _says_nothing(key: str, node: Mapping[str, Any], types: tuple[str, ...]) -> bool:
    """Whether a keyword allows everything that the rest of its schema allows."""
    value = node[key]
    if key == "if":
        return "then" not in node and "else" not in node
    if key in ("minContains", "maxContains") and "contains" not in node:
        return True
    if key == "format":
        return value not in GUIDANCE_FORMATS | XGRAMMAR_FORMATS
    if key in ("uniqueItems", "minLength", "minItems", "minProperties"):
        return not value
    if key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames", "additionalItems"):
        return value is True or value == {}
    if key in ("required", "patternProperties", "dependentRequired", "dependentSchemas"):
        return not value
    return bool(types) and key in _ALL_TYPED and not any(key in OF_TYPE.get(t, ()) for t in types)


_ALL_TYPED = frozenset().union(*OF_TYPE.values())
_ALONE = ("$ref", "anyOf", "allOf", "enum", "const")
"""Keywords beside which xgrammar drops all others."""


def lost_by_xgrammar(schema: Any) -> list[UnenforcedKeyword]:
    """The keywords that xgrammar drops, or reads otherwise than JSON Schema does."""
    return [
        UnenforcedKeyword(at, keyword)
        for at, node in subschemas(schema)
        for keyword in _lost_here(node, inner=bool(at))
    ]


def _lost_here(node: Mapping[str, Any], inner: bool) -> Iterator[str]:
    said = asserted(node)
    if inner and isinstance(node.get("$id"), str):
        yield "$id"  # references inside are relative to it
    alone = next((key for key in _ALONE if key in said), None)
    if alone is not None:
        yield from _lost_beside(alone, node, said)
        return
    types = types_of(node)
    if not types and "properties" in said and OF_TYPE["object"].issuperset(said):
        types = ("object",)
    for keyword in said:
        typed = any(keyword in OF_TYPE.get(name, ()) for name in types)
        if keyword != "type" and not (typed and _kept_by_xgrammar(keyword, node, types)):
            yield keyword


def _lost_beside(alone: str, node: Mapping[str, Any], said: list[str]) -> Iterator[str]:
    value = node[alone]
    if alone in ("enum", "const"):
        values = value if alone == "enum" and isinstance(value, list) else [value]
        types = types_of(node)
        fits = all(any(_is(type_, one) for type_ in types) for one in values)
        yield from (k for k in said if k != alone and not (k == "type" and fits))
        return
    if alone == "$ref" and not _is_local(value):
        yield alone
    if alone == "allOf" and not (isinstance(value, list) and len(value) == 1):
        yield alone
    yield from (key for key in said if key != alone)


def _is_local(reference: Any) -> bool:
    """Whether xgrammar finds what a `$ref` names: a place in the same schema, without escapes."""
    return reference == "#" or (
        isinstance(reference, str) and reference.startswith("#/") and not {"%", "~"} & {*reference}
    )


def _is(type_: str, value: Any) -> bool:
    """Whether a JSON value is of a type."""
    if isinstance(value, bool) or value is None:
        return type_ == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return type_ == "number" or (type_ == "integer" and value == int(value))
    kinds: dict[str, Any] = {"string": str, "array": list, "object": dict}
    return type_ in kinds and isinstance(value, kinds[type_])


def _kept_by_xgrammar(keyword: str, node: Mapping[str, Any], types: tuple[str, ...]) -> bool:
    """Whether xgrammar enforces a keyword in a schema of these types, without combinations.

    It writes strings of a bounded length, and some patterns, with characters that JSON forbids.
    """
    value = node[keyword]
    if keyword in _LENGTHS:
        return keyword == "format" and value in XGRAMMAR_FORMATS and not {*_LENGTHS[:3]} & {*node}
    if keyword in _RANGES:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = number and ("integer" not in types or value == int(value))
        return keyword != "multipleOf" and whole
    given = node.get("properties")
    named: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if keyword == "required":
        return isinstance(value, list) and all(name in named for name in value)
    if keyword == "minProperties":
        return bool(named) or bool(node.get("additionalProperties", False))
    if keyword in ("items", "unevaluatedItems", "unevaluatedProperties"):
        return not isinstance(value, list)
    return keyword in ("properties", "additionalProperties", "maxProperties") or (
        keyword in ("prefixItems", "minItems", "maxItems")
    )


def refused_here(node: Mapping[str, Any]) -> list[str]:
    """The keywords of one schema, not of those inside, that llguidance refuses.

    node: as rewriting.py leaves it.
    """
    named, required = node.get("properties"), node.get("required") or ()
    optional = isinstance(named, Mapping) and any(name not in required for name in named)
    return [
        key
        for key, value in node.items()
        if key in NOT_IN_GUIDANCE
        or (key in ("minProperties", "maxProperties") and optional)
        or (key == "pattern" and isinstance(value, str) and looks_around(value))
    ]


def unreadable_patterns(schema: Any) -> list[UnenforcedKeyword]:
    """The patterns that no compiler reads at all."""
    return [
        UnenforcedKeyword(at, "pattern")
        for at, node in subschemas(schema)
        if isinstance(node.get("pattern"), str) and unreadable(node["pattern"])
    ]
