"""The bounds on the size of a request's grammar, and that checking them is cheap."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import ConfigError, RequestError
from cfg_core.grammars import bounds
from cfg_core.grammars.bounds import bracket_depth
from cfg_core.grammars.trials import GrammarLimits
from deployments.config.args import AppArgs


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def answer(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


PASSES = [
    outputs(choice=[f"label {i}" for i in range(2000)]),
    outputs(json=properties(1000)),
    outputs(json=json.dumps(properties(1000))),
    outputs(json={"enum": [f"v{i}" for i in range(2000)]}),
    outputs(regex=r"\((\(|x)*\)" * 50),
    outputs(grammar='root ::= "a" root | "b"'),
    outputs(json_object=True),
    outputs(choice=7, regex=[], json=3, grammar={}, structural_tag=None),
    answer(nested(60)),
    {"tools": [tool(properties(20)) for _ in range(64)]},
    {"tools": "x", "response_format": "y", "structured_outputs": []},
    {"prompt": "x" * 10**6},
]


@pytest.mark.parametrize("body", PASSES, ids=lambda body: repr(body)[:40])
def test_what_users_send_passes(body: dict[str, Any]) -> None:
    bounds.check_body(body)


REFUSED = [
    (outputs(choice=["x"] * 100_000), "structured_outputs", "100000 entries"),
    (outputs(choice=["x" * 10_000] * 100), "structured_outputs", "characters"),
    (outputs(regex="a" * 10**6), "structured_outputs", "characters"),
    (outputs(regex="(" * 300 + ")" * 300), "structured_outputs", "levels of brackets"),
    (outputs(grammar="root ::= a\n" * 5000), "structured_outputs", "rules"),
    (outputs(json=properties(20_000)), "structured_outputs", "properties"),
    (outputs(json=json.dumps(properties(5_000))), "structured_outputs", "properties"),
    (
        outputs(json={"enum": [str(i) for i in range(100_000)]}),
        "structured_outputs",
        "entries in one",
    ),
    (outputs(json={"const": "x" * 10**6}), "structured_outputs", "characters"),
    (outputs(json=nested(90)), "structured_outputs", "levels"),
    (outputs(json='{"a":' * 100_000 + "1" + "}" * 100_000), "structured_outputs", "characters"),
    (outputs(json='{"a":' * 10_000 + "1" + "}" * 10_000), "structured_outputs", "levels"),
    (
        outputs(structural_tag=json.dumps({"structures": [properties(5_000)]})),
        "structured_outputs",
        "properties",
    ),
    (outputs(whitespace_pattern=" *" * 1000), "structured_outputs", "characters"),
    (
        answer({"anyOf": [{"const": i} for i in range(3999)] * 1, "x": [[0] * 3999] * 9}),
        "response_format",
        "values",
    ),
    (answer(properties(20_000)), "response_format", "properties"),
    (
        {"response_format": {"type": "structural_tag", "format": nested(90)}},
        "response_format",
        "levels",
    ),
    ({"text": {"format": {"type": "json_schema", "schema": nested(90)}}}, "text", "levels"),
    ({"output_config": {"format": {"schema": nested(90)}}}, "output_config", "levels"),
    ({"tools": [tool({})] * 300}, "tools", "tools"),
    ({"tools": [tool(properties(200)) for _ in range(64)]}, "tools", "properties"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: repr(value)[:40])
def test_what_is_too_large_is_refused_by_field_and_bound(
    body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        bounds.check_body(body)
    assert refusal.value.param == param
    assert len(str(refusal.value)) < 200


def test_deep_values_overflow_nothing_and_large_ones_end_early() -> None:
    deep: Any = 1
    for _ in range(200_000):
        deep = [deep]
    started = time.process_time()
    for value in ({"x": deep}, {"x": [[1] * 3000] * 3000}, {"x": [0] * 10**6}):
        with pytest.raises(RequestError):
            bounds.check_body(outputs(json=value))
    assert time.process_time() - started < 1
    while isinstance(deep, list):  # or its destructor recurses
        deep = deep.pop()


@given(st.text(alphabet='()[]{}\\"a', max_size=200))
def test_depth_is_that_of_the_brackets_that_are_open(text: str) -> None:
    """The oracle is a simple count: opened brackets minus closed ones, never below 0."""
    depth, deepest, plain = 0, 0, text.replace("\\", "")
    for char in plain:
        depth = max(0, depth + (char in "([{") - (char in ")]}"))
        deepest = max(deepest, depth)
    assert bracket_depth(plain) == deepest
    assert bracket_depth(text) <= len(text)


def test_hidden_brackets_do_not_count() -> None:
    assert bracket_depth(r"\(\(\(") == 0
    assert bracket_depth('{"a": "((("}', quoted=True) == 1
    assert bracket_depth(r'{"a": "\"((("}', quoted=True) == 1


def args_of(**grammars: Any) -> AppArgs:
    return AppArgs.model_validate({"model": "m", "grammars": grammars})


def test_the_section_of_the_yaml_is_the_dataclass() -> None:
    args = args_of(places=2, cpu_s=1.5)
    assert args.grammars == GrammarLimits(places=2, cpu_s=1.5)
    assert args.plugin_kwargs["grammars"] == {"places": 2, "cpu_s": 1.5}
    assert args_of().plugin_kwargs["grammars"] == {}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("plases", 2, "unknown key `plases` in `grammars`: did you mean `places`"),
        (
            "schema_chars",
            10,
            "unknown key `schema_chars` in `grammars`: known keys: at_start",
        ),
        ("places", 0, "grammars.places\n.*greater than or equal to 1"),
        ("memory_mb", 63, "grammars.memory_mb\n.*greater than or equal to 64"),
    ],
)
def test_what_the_section_cannot_have_is_an_error(key: str, value: int, words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        args_of(**{key: value})
