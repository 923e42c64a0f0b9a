"""What compilers make of keywords, and how schemas are rewritten and negated."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cfg_core.grammars.keywords import UnenforcedKeyword, lost_by_xgrammar, unreadable_patterns
from cfg_core.grammars.negation import negated
from cfg_core.grammars.patterns import looks_around, other_than, unreadable, without_lookaheads
from cfg_core.grammars.rewriting import readable, relaxed, rewritten

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "title": "x"},
        {"properties": {"a": {"anyOf": [TEXT, {"type": "null"}], "default": None}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": 3}}},
        {"type": "array", "items": {"enum": ["a", "b"], "type": "string"}, "minItems": 1},
        {"type": "integer", "maxLength": 3},
        {"type": "array", "uniqueItems": False},
        {"type": "string", "format": "binary"},
    ],
    ids=repr,
)
def test_xgrammar_keeps_what_most_people_send(schema: Any) -> None:
    assert lost_by_xgrammar(schema) == []


def test_what_xgrammar_loses_has_a_place() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": "string", "maxLength": 3}, "c": {"not": {"const": 1}}},
        "required": ["a/b", "z"],
    }
    assert set(lost_by_xgrammar(schema)) == {
        UnenforcedKeyword("", "required"),
        UnenforcedKeyword("/properties/a~1b", "maxLength"),
        UnenforcedKeyword("/properties/c", "not"),
    }


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^(?=a)b", True),
        (r"[(?=]", False),
        (r"\(?=", False),
        (r"(?<!a)b", True),
        (r"(?:a)", False),
    ],
)
def test_lookarounds_are_found(pattern: str, expected: bool) -> None:
    assert looks_around(pattern) is expected


@pytest.mark.parametrize(
    ("pattern", "expected"), [(r"\bfoo", True), (r"[\b]", False), (r"(a)\1", True), (r"\\b", False)]
)
def test_unreadable_patterns_are_found(pattern: str, expected: bool) -> None:
    assert unreadable(pattern) is expected
    assert bool(unreadable_patterns({"items": {"pattern": pattern}})) is expected


def test_lookaheads_become_patterns() -> None:
    assert without_lookaheads(r"^(?=.*[)]a)(?=b)c$") == [r"^(?:.*[)]a)", "^(?:b)", "^c$"]
    assert without_lookaheads(r"^(?=a)b|c") is None
    assert without_lookaheads(r"^(?!a)b") is None
    assert without_lookaheads("abc") is None


def test_a_pattern_of_other_texts() -> None:
    pattern = re.sub(
        r"\\x\{(\w+)\}",
        lambda found: f"\\U{int(found[1], 16):08x}",
        other_than(["a", "ab", "é]", ""]),
    )
    assert not any(re.search(pattern, text) for text in ("a", "ab", "é]", ""))
    assert all(re.search(pattern, text) for text in ("b", "aa", "abc", "é", "é]x", "\n"))


def test_what_cannot_be_negated_is_none() -> None:
    assert negated({"pattern": "a"}) is None
    assert negated({"properties": {"a": {"$ref": "#"}}}) is None
    assert negated({"minimum": "x"}) is None
    assert negated({"title": "all"}) is False
    assert negated(False) is True


def test_rewriting_leaves_what_it_cannot_write() -> None:
    schema = {"type": "string", "not": {"pattern": "a"}, "format": "binary"}
    assert rewritten(schema) == {"type": "string", "not": {"pattern": "a"}}
    assert relaxed(rewritten(schema)) == ({"type": "string"}, [UnenforcedKeyword("", "not")])


def test_what_no_compiler_reads_is_dropped_of_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "any", "pattern": "("}}}
    kept, lost = readable(schema)
    assert kept == {"type": "object", "properties": {"a": {}}}
    assert lost == [
        UnenforcedKeyword("/properties/a", "type"),
        UnenforcedKeyword("/properties/a", "pattern"),
    ]
    assert readable("x") == (True, [UnenforcedKeyword("", "parameters")])
