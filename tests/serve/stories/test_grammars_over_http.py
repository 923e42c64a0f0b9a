"""Extreme grammars are refused. That other clients go on: tests/serve/waits."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.serve.grammar_bodies import (
    CHAT,
    COMPLETION,
    MARK,
    PATTERNS,
    SLOW,
    answer,
    outputs,
    slow_tag,
    tag,
)
from tools.serving.process import ServeProcess

MESSAGES = [{"role": "user", "content": "Give me JSON"}]
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
SECTION = {"logits_processors": [{"name": "section_budget", "max_tokens": 1, "end": "b"}]}
HOSTILE = {
    "choice of 100,000": outputs(choice=[f"{MARK} {i}" for i in range(100_000)]),
    "enum of 100,000": answer({"enum": [f"{MARK} {i}" for i in range(100_000)]}),
    "20,000 properties": answer(
        {"type": "object", "properties": {f"{MARK}{i}": {} for i in range(20_000)}}
    ),
    "regex of 1 MB": outputs(regex=MARK * 50_000),
    "slow to compile": slow_tag(SLOW),
    "nested repeats": outputs(regex="(((a{0,1000}){0,1000}){0,1000}){0,1000}"),
    "root ::= root": outputs(grammar="root ::= root"),
    "tag of nothing": tag({"type": "grammar", "grammar": "root ::= root"}),
    "mutual $ref": answer(MUTUAL),
    "no text": outputs(regex=r"[^\s\S]"),
    "no regex": outputs(regex=f"(?={MARK})x"),
    "deep brackets": outputs(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "allowed_token_ids": outputs(regex="[0-9]{3}") | {"allowed_token_ids": [100, 101]},
    "section_budget": outputs(choice=["red", "blue"]) | SECTION,
    "section_budget and allowed_token_ids": {"allowed_token_ids": [100, 101]} | SECTION,
    "vocabulary_gate": outputs(regex="[0-9]{4}")
    | {"logits_processors": [{"name": "vocabulary_gate", "characters": "a-z"}]},
}
SERVED = {
    "choice of 2,000": outputs(choice=[f"label {i}" for i in range(2000)]),
    "1,000 properties": answer(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    ),
    "150 properties with patterns": answer({"type": "object", "properties": PATTERNS}),
    "the same in a tag": tag(
        {"type": "json_schema", "json_schema": {"type": "object", "properties": PATTERNS}}
    ),
    "big repeat": outputs(regex="a{1,100000}"),
    "left recursion": outputs(grammar='root ::= root "a" | "a"'),
    "lark": outputs(grammar='start: "a" | "b" start'),
    "llguidance's": answer(
        {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 2}}}
    ),
    "structural tag": tag({"type": "json_schema", "json_schema": {"type": "object"}}),
    "json_object": {"response_format": {"type": "json_object"}},
}


@pytest.fixture(scope="module", autouse=True)
def compilers_are_loaded(http: httpx.Client, model: str) -> None:
    """Send a first grammar, because it waits until the process that tests grammars has started."""
    body = {"model": model, "prompt": "Once", "max_tokens": 4, **outputs(choice=["red"])}
    assert http.post(COMPLETION, json=body, timeout=120).status_code == 200


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_what_people_send_is_served(
    http: httpx.Client, model: str, path: str, fields: dict[str, Any]
) -> None:
    start = (
        {"prompt": "Once"}
        if path == COMPLETION
        else {"messages": [{"role": "user", "content": "Once"}]}
    )
    given = http.post(path, json={"model": model, "max_tokens": 8, **start, **fields})
    assert given.status_code == 200, given.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_are_400_with_a_sentence(
    http: httpx.Client, model: str, fields: dict[str, Any], stream: bool
) -> None:
    started = time.monotonic()
    body = {"model": model, "prompt": "Once", "max_tokens": 8, "stream": stream, **fields}
    given = http.post(COMPLETION, json=body)
    assert given.status_code == 400, given.text[:500]
    message = given.json()["error"]["message"]
    assert 20 < len(message) < 500
    assert MARK not in message
    assert time.monotonic() - started < 60


def strict(schema: Any) -> dict[str, Any]:
    given = answer(schema)
    given["response_format"]["json_schema"]["strict"] = True
    return given


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_strict_schema_that_nobody_enforces_is_400(http: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 4}
    given = http.post(CHAT, json={**body, **strict(UNIQUE)})
    assert given.status_code == 400
    said = given.json()["error"]
    assert "`uniqueItems` at /properties/a" in said["message"]
    assert said["param"] == "response_format.json_schema.schema"
    tool = {"name": "note", "strict": True, "parameters": UNIQUE}
    given = http.post(CHAT, json={**body, "tools": [{"type": "function", "function": tool}]})
    assert given.status_code == 400
    assert "tools[0].function.parameters (tool 'note')" in given.json()["error"]["message"]
    assert http.post(CHAT, json={**body, **answer(UNIQUE)}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["red"]}, "red"),
        ({"guided_regex": "[0-9]{3}", "guided_decoding_backend": "auto"}, r"\d{3}"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 7}}, "[567]"),
        ({"guided_json": '{"enum": ["x"]}', "guided_whitespace_pattern": None}, '"x"'),
        ({"guided_grammar": 'root ::= "yes"'}, "yes"),
    ],
)
def test_the_old_names_of_structured_outputs(
    http: httpx.Client, model: str, path: str, fields: dict[str, Any], expected: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETION else {"messages": MESSAGES}
    given = http.post(path, json={"model": model, "max_tokens": 8, **prompt, **fields})
    (choice,) = given.json()["choices"]
    assert re.fullmatch(expected, choice["text"] if path == COMPLETION else content(choice))


def content(choice: Any) -> str:
    return str(choice["message"]["content"])


def test_an_answer_in_json_does_not_end_in_white_space(http: httpx.Client, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 7}},
        "required": ["a"],
    }
    body = {"model": model, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    (choice,) = http.post(CHAT, json={**body, **answer(schema)}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(content(choice))["a"] in (5, 6, 7)


def test_no_log_shows_a_pattern(server: ServeProcess) -> None:
    if hasattr(server, "log"):
        assert MARK not in server.log.read_text(errors="replace")


def test_the_bounds_are_those_of_the_yaml(http: httpx.Client, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "x", **outputs(choice=["x"] * 4001)})
    given = http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert "at most 4000" in given.json()["error"]["message"]
