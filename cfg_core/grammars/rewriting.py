"""A JSON schema without the keywords that llguidance lacks, which means the same.

llguidance intersects and unites schemas, but it negates none. So `not`, `if`, overlapping `oneOf`
and keywords that depend on a property are written with `allOf` and `anyOf` of their negations,
where these can be written. What cannot be rewritten stays, for the caller to drop or to refuse.

Standard library only. Callers bound the schema's depth first. The result may be larger than the
schema; it is made where time and memory are limited (grammar_helper/trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import combinations
from math import comb
from typing import Any

from cfg_core.grammars.keywords import (
    COMBINED,
    GUIDANCE_FORMATS,
    XGRAMMAR_FORMATS,
    UnenforcedKeyword,
    asserted,
    refused_here,
    subschemas,
)
from cfg_core.grammars.negation import COUNTS, Parts, is_invalid, negated
from cfg_core.grammars.patterns import looks_around, without_lookaheads
from cfg_core.grammars.schemas import inner

MOST_BRANCHES = 8
"""Branches of a `oneOf` that are compared with each other."""

MOST_SETS = 64
"""Sets of properties that are written for a number of properties."""

_IGNORED = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary")


def without_formats(schema: Any, known: Iterable[str] = ()) -> Any:
    """The schema without formats that are unknown, which are annotations.

    known: by default the formats that any compiler knows.
    """
    names = frozenset(known) or GUIDANCE_FORMATS | XGRAMMAR_FORMATS
    if not isinstance(schema, dict):
        return schema
    change = partial(without_formats, known=names)
    return {
        key: inner(key, value, change)
        for key, value in schema.items()
        if key != "format" or (isinstance(value, str) and value in names)
    }


def rewritten(schema: Any, one_of: bool = False) -> Any:
    """The schema with what llguidance reads, as far as that is possible.

    one_of: whether to write `oneOf` as `anyOf` of branches that exclude each other. llguidance
        reads `oneOf` by itself if it can prove that.
    """
    schema = without_formats(schema, GUIDANCE_FORMATS)
    return _rewritten(schema, one_of)


def _rewritten(schema: Any, one_of: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    node = {
        key: inner(key, value, partial(_rewritten, one_of=one_of))
        for key, value in schema.items()
        if key not in _IGNORED
    }
    for key in {"uniqueItems", "if", "unevaluatedProperties", "unevaluatedItems"} & node.keys():
        if key not in asserted(node):
            del node[key]
    parts = Parts()
    for rewrite in (_whole, _unevaluated, _names, _counted, _depending, _pattern):
        rewrite(node, parts)
    for keyword, negate in (("not", _not), ("if", _if), ("oneOf", _one_of)):
        if keyword in node and (keyword != "oneOf" or one_of):
            part = negate(schema)
            if part is not None:
                node.pop(keyword)
                parts.append(_rewritten(part, one_of))
    if "if" not in node:
        node.pop("then", None), node.pop("else", None)
    if parts:
        node["allOf"] = [*(node.get("allOf") or ()), *parts]
    return node


def _unevaluated(node: dict[str, Any], parts: Parts) -> None:
    """Without combinations, what is evaluated stands beside the keyword."""
    if (COMBINED | {"dependentSchemas"}) & node.keys():
        return
    if "unevaluatedProperties" in node:
        node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
    if "unevaluatedItems" in node and not isinstance(node.get("items"), list):
        node.setdefault("items", node.pop("unevaluatedItems"))


def _names(node: dict[str, Any], parts: Parts) -> None:
    """`propertyNames` as the names that `properties` or `patternProperties` allow."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or node.get("patternProperties"):
        return
    said, named = set(asserted(names)) - {"type"}, node.get("properties") or {}
    other = node.get("additionalProperties", True)
    values = names.get("enum", [names["const"]] if "const" in names else None)
    if said in ({"enum"}, {"const"}) and isinstance(values, list):
        allowed = [name for name in values if isinstance(name, str)]
        node["properties"] = {name: named.get(name, other) for name in allowed}
    elif said == {"pattern"} and not named and not looks_around(str(names["pattern"])):
        node["patternProperties"] = {names["pattern"]: other}
    elif said and said <= {"minLength", "maxLength"} and not named:
        most = names.get("maxLength", "")
        pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{most}}}$"
        node["patternProperties"] = {pattern: other}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _whole(node: dict[str, Any], parts: Parts) -> None:
    """Counts that are written with a fraction of zero, which JSON Schema allows."""
    for key in COUNTS & node.keys():
        if isinstance(node[key], float) and node[key].is_integer():
            node[key] = int(node[key])


def _counted(node: dict[str, Any], parts: Parts) -> None:
    """Numbers of properties as the sets of properties that have them, if these are few."""
    named, required = node.get("properties"), node.get("required") or ()
    if not isinstance(named, dict) or node.get("additionalProperties") is not False:
        return
    if node.get("patternProperties"):
        return
    optional = [name for name in named if name not in required]
    for key, ways in (("minProperties", _having), ("maxProperties", _lacking)):
        if isinstance(node.get(key), int):
            number = node[key] - len(required)
            if 0 <= number <= len(optional) and comb(len(optional), number) <= MOST_SETS:
                del node[key]
                parts.append({"anyOf": ways(optional, number)})
            elif number < 0 and key == "minProperties":
                del node[key]


def _having(optional: list[str], number: int) -> Parts:
    return [{"required": [*some]} for some in combinations(optional, number)]


def _lacking(optional: list[str], number: int) -> Parts:
    return [
        {"properties": {name: False for name in optional if name not in some}}
        for some in combinations(optional, number)
    ]


def _depending(node: dict[str, Any], parts: Parts) -> None:
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = node.pop(key, None)
        for name, then in value.items() if isinstance(value, Mapping) else ():
            wanted = {"required": then} if isinstance(then, list) else then
            with_it = {"allOf": [{"required": [name]}, wanted]}
            parts.append({"anyOf": [{"properties": {name: False}}, with_it]})


def _not(schema: Mapping[str, Any]) -> Any:
    return negated(schema["not"])


def _if(schema: Mapping[str, Any]) -> Any:
    condition, opposite = schema["if"], negated(schema["if"])
    if opposite is None:
        return None
    then, otherwise = schema.get("then", True), schema.get("else", True)
    return {"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]}


def _pattern(node: dict[str, Any], parts: Parts) -> None:
    pattern = node.get("pattern")
    several = without_lookaheads(pattern) if isinstance(pattern, str) else None
    if several is not None:
        del node["pattern"]
        parts.extend({"type": "string", "pattern": one} for one in several)


def _one_of(schema: Mapping[str, Any]) -> Any:
    branches = schema["oneOf"]
    if not isinstance(branches, list) or len(branches) > MOST_BRANCHES:
        return None
    opposites = [negated(branch) for branch in branches]
    if any(opposite is None for opposite in opposites):
        return None
    return {
        "anyOf": [
            {"allOf": [branch, *opposites[:i], *opposites[i + 1 :]]}
            for i, branch in enumerate(branches)
        ]
    }


def any_of(schema: Any) -> Any:
    """The schema with `anyOf` in place of `oneOf`."""
    if not isinstance(schema, dict):
        return schema
    node = {key: inner(key, value, any_of) for key, value in schema.items()}
    if "oneOf" in node:
        branches = node.pop("oneOf")
        if "anyOf" in node:
            node["allOf"] = [*(node.get("allOf") or ()), {"anyOf": branches}]
        else:
            node["anyOf"] = branches
    return node


def one_ofs(schema: Any) -> list[UnenforcedKeyword]:
    """The places of `oneOf`."""
    return [UnenforcedKeyword(at, "oneOf") for at, node in subschemas(schema) if "oneOf" in node]


def relaxed(schema: Any) -> tuple[Any, list[UnenforcedKeyword]]:
    """The schema without the keywords that llguidance refuses, and these.

    schema: as `rewritten` leaves it.
    """
    return _kept(schema, refused_here)


def readable(schema: Any) -> tuple[Any, list[UnenforcedKeyword]]:
    """The schema without keywords whose value JSON Schema forbids or no compiler reads, and these.

    A `type` that does not exist is one, or a pattern with a word boundary.
    """
    if not isinstance(schema, dict | bool):
        return True, [UnenforcedKeyword("", "parameters")]
    return _kept(schema, lambda node: [key for key in node if is_invalid(key, node[key])])


def _kept(
    schema: Any, keys_of: Callable[[Mapping[str, Any]], list[str]]
) -> tuple[Any, list[UnenforcedKeyword]]:
    drop = {id(node): (at, keys_of(node)) for at, node in subschemas(schema)}
    lost = [UnenforcedKeyword(at, key) for at, keys in drop.values() for key in keys]
    return _dropped(schema, {id_: set(keys) for id_, (_, keys) in drop.items()}), lost


def _dropped(schema: Any, drop: Mapping[int, set[str]]) -> Any:
    if not isinstance(schema, dict):
        return schema
    keys = drop.get(id(schema), set())
    return {
        key: inner(key, value, partial(_dropped, drop=drop))
        for key, value in schema.items()
        if key not in keys
    }
