"""Every text that a grammar of a schema allows is valid by that schema, or a keyword is named.

For each keyword, texts are drawn at random from the masks of the compiler that the trial chooses,
and wrong ones are played. `jsonschema` is the judge. No engine runs.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cfg_core.grammars.keywords import ASSERTIONS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
TEXTS, MOST_TOKENS = 25, 220
WHITESPACE = 4
A, B = {"type": "integer", "minimum": 0}, {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": A, "b": B}}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
PAIR = {"type": "array", "prefixItems": [B]}
REQUIRED_A = {"properties": {"a": {"const": 1}}, "required": ["a"]}
NESTED = {"$ref": "#/$defs/x", "maximum": 9, "$defs": {"x": {"type": "integer", "minimum": 3}}}
ENFORCED: list[tuple[str, Any, list[Any]]] = [
    ("type", {"type": ["string", "null"]}, [1, {}]),
    ("enum", {"enum": ["a", "ab", 3], "minLength": 2}, ["a", "b"]),
    ("enum", {"type": "integer", "enum": [1, 2, 3], "minimum": 2}, [1, 4]),
    ("const", {"const": {"a": [1]}}, [{}, {"a": [2]}]),
    ("minLength", {"type": "string", "minLength": 2}, ["a", ""]),
    ("maxLength", {"type": "string", "maxLength": 3}, ["abcd"]),
    ("pattern", {"type": "string", "pattern": "^[a-z]{1,255}$"}, ["", "A"]),
    ("pattern", {"type": "string", "pattern": '^\\s\\W["\\\\]$'}, ["a"]),
    ("pattern", {"type": "string", "pattern": "^(?=.*b)(?=.*a)[ab]{2,4}$"}, ["aa", "b"]),
    ("pattern", {"type": "string", "pattern": "^[ab]+$", "maxLength": 2}, ["aaa", "c"]),
    ("format", {"type": "string", "format": "ipv4"}, ["1.2.3", "256.1.1.1"]),
    ("format", {"type": "string", "format": "date", "maxLength": 10}, ["2020-13-01"]),
    ("minimum", {"type": "integer", "minimum": 5, "maximum": 7}, [4, 8]),
    ("maximum", {"type": "number", "maximum": 1.5}, [1.6]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, [0, -1]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 4}, [4]),
    ("minimum", {"minimum": 5}, [4]),
    ("multipleOf", {"type": "integer", "multipleOf": 3}, [4]),
    ("properties", OBJECT, [{"a": -1}, {"b": "x"}]),
    ("required", {"type": "object", "required": ["a"]}, [{}, {"b": 1}]),
    ("required", {**OBJECT, "required": ["a", "z"]}, [{"a": 1}, {"a": 1, "b": 2}]),
    ("additionalProperties", {**OBJECT, "additionalProperties": B}, [{"z": "x"}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": B}}, [{"ab": "x"}]),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}}, [{"c": 1}]),
    ("propertyNames", {"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"c": 1}]),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}}, [{"abc": 1}]),
    ("minProperties", {**OBJECT, "minProperties": 2}, [{}, {"a": 1}]),
    ("maxProperties", {**OBJECT, "maxProperties": 1}, [{"a": 1, "b": 2}]),
    (
        "minProperties",
        {**OBJECT, "minProperties": 1, "dependentRequired": {"a": ["b"]}},
        [{}, {"a": 1}],
    ),
    (
        "maxProperties",
        {**OBJECT, "maxProperties": 1, "dependentRequired": {"a": ["b"]}},
        [{"a": 1, "b": 1}, {"a": 1}],
    ),
    ("dependentRequired", {**OBJECT, "dependentRequired": {"a": ["b"]}}, [{"a": 1}]),
    ("dependentSchemas", {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1}]),
    ("dependencies", {**OBJECT, "dependencies": {"a": ["b"]}}, []),
    ("unevaluatedProperties", {**OBJECT, "unevaluatedProperties": False}, [{"z": 1}]),
    ("items", {"type": "array", "items": B}, [["x"]]),
    ("prefixItems", {"type": "array", "prefixItems": [B], "items": False}, [["x"], [1, 2]]),
    (
        "unevaluatedItems",
        {"type": "array", "prefixItems": [B], "unevaluatedItems": False},
        [[1, 2]],
    ),
    (
        "additionalItems",
        {"$schema": DRAFT_7, "type": "array", "items": [B], "additionalItems": False},
        [[1, 2], ["x"]],
    ),
    ("minItems", {"type": "array", "items": B, "minItems": 2}, [[1]]),
    ("maxItems", {"type": "array", "items": B, "maxItems": 1}, [[1, 2]]),
    ("minItems", {"type": "array", "minItems": 1, "maxItems": 2}, [[], [1, 2, 3]]),
    ("anyOf", {"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 3}]}, [3, "ab"]),
    ("anyOf", {**OBJECT, "anyOf": EITHER}, [{}, "x"]),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [2, 10, "x"]),
    (
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"a": A}, "required": ["a"]},
                {"type": "object", "properties": {"b": B}, "required": ["b"]},
            ]
        },
        [{"a": 1}, {"b": 1}, "x"],
    ),
    (
        "oneOf",
        {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]},
        [3],
    ),
    (
        "oneOf",
        {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1, "b": 1}, {}],
    ),
    (
        "oneOf",
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
                for k in ("x", "y")
            ]
        },
        [{"k": "z"}, {}],
    ),
    ("not", {"type": "string", "not": {"const": "a"}, "maxLength": 1}, ["a"]),
    ("not", {"type": "string", "not": {"enum": ["a", "ab", ""]}}, ["a", "ab", ""]),
    ("not", {"not": {"type": ["string", "object", "array"]}}, ["x", {}, []]),
    ("not", {"type": "integer", "not": {"minimum": 5}}, [5, 9]),
    ("not", {"type": "integer", "not": {"enum": [1, 3]}}, [1, 3]),
    ("not", {**OBJECT, "not": {"required": ["a", "b"]}}, [{"a": 1, "b": 1}]),
    ("if", {**OBJECT, "if": REQUIRED_A, "then": {"required": ["b"]}}, [{"a": 1}]),
    (
        "if",
        {
            **OBJECT,
            "if": REQUIRED_A,
            "then": {"required": ["b"]},
            "else": {"properties": {"b": False}},
        },
        [{"a": 1}, {"a": 2, "b": 1}],
    ),
    ("$ref", NESTED, [2, 10]),
    ("$ref", {"$defs": {"q": {"$anchor": "w", "type": "integer"}}, "$ref": "#w"}, ["x"]),
]
"""Keyword, schema, and values that it forbids."""

NOT_ENFORCED: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2}),
    ("maxContains", {"type": "array", "contains": {"const": 1}, "maxContains": 2}),
    ("propertyNames", {**OBJECT, "propertyNames": {"pattern": "^[ab]+$"}}),
    ("unevaluatedItems", {**PAIR, "unevaluatedItems": False, "anyOf": [{"minItems": 1}]}),
    ("$recursiveRef", {"type": "array", "items": {"$recursiveRef": "#"}}),
    ("pattern", {"type": "string", "pattern": "^(?!a)[ab]$"}),
    ("not", {"type": "string", "not": {"pattern": "^a"}}),
    ("not", {"type": "number", "not": {"type": "integer"}}),
    ("if", {"type": "string", "if": {"pattern": "^a"}, "then": {"maxLength": 3}}),
    (
        "oneOf",
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]},
    ),
    (
        "unevaluatedProperties",
        {"allOf": [OBJECT, {"$ref": "#/$defs/x"}], "$defs": {"x": OBJECT}}
        | {"unevaluatedProperties": False},
    ),
    ("$dynamicRef", {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", **B}}}),
]
ANNOTATIONS: list[tuple[str, Any]] = [
    ("format", {"type": "string", "format": "binary"}),
    ("format", {"type": "integer", "format": "int32"}),
    ("title", {"type": "string", "title": "x"}),
    ("description", {"type": "string", "description": "x"}),
    ("default", {"type": "integer", "default": 3}),
    ("examples", {"type": "integer", "examples": [3]}),
    ("contentEncoding", {"type": "string", "contentEncoding": "base64"}),
    ("nullable", {"type": "string", "nullable": True}),
    ("uniqueItems", {"type": "array", "uniqueItems": False}),
    ("x-order", {"type": "object", "x-order": 1}),
]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trial of an engine whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from cfg_core.vllm_plugin.grammar_helper.settings import settings_of
    from cfg_core.vllm_plugin.grammar_helper.trial import Trial
    from tests.engine.test_grammar_sandbox import config_of

    folder = tmp_path_factory.mktemp("bytes")
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "</s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257}
    (folder / "config.json").write_text(json.dumps(config))
    return Trial(settings_of(config_of(folder)))


class Played:
    """The grammar that the engine core would compile of a verdict."""

    def __init__(self, trial: Any, verdict: dict[str, Any]) -> None:
        from vllm.sampling_params import StructuredOutputsParams

        outputs = StructuredOutputsParams(
            **{kind: value for kind, value in verdict["changed"].items() if value is not None}
        )
        outputs._backend = verdict["backend"]
        self._trial, self._outputs = trial, outputs
        self._tokens = trial._tokenizer.convert_ids_to_tokens(range(257))
        self._weights = [_weight(token) for token in self._tokens]

    def _new(self) -> tuple[Any, Any]:
        backend = self._trial._backends.get(self._outputs._backend)
        return self._trial._compiled(self._outputs), backend.allocate_token_bitmask(1)

    def _allowed(self, grammar: Any, mask: Any) -> list[int]:
        from cfg_core.vllm_plugin.grammar_helper.trial import allowed_by

        grammar.fill_bitmask(mask, 0)
        return [int(token) for token in allowed_by(mask[0]) if token < 257]

    def text(self, chance: random.Random) -> str | None:
        """A random text, None if it does not end within MOST_TOKENS."""
        (grammar, mask), ids = self._new(), list[int]()
        for _ in range(MOST_TOKENS):
            allowed = self._allowed(grammar, mask)
            assert allowed, ids
            (token,) = chance.choices(allowed, [self._weights[token] for token in allowed])
            if token == 256:
                return str(self._trial._tokenizer.decode(ids))
            assert grammar.accept_tokens("walk", [token])
            ids.append(token)
        return None

    def allows(self, text: str) -> bool:
        grammar, mask = self._new()
        for token in self._trial._tokenizer.encode(text, add_special_tokens=False):
            if token not in self._allowed(grammar, mask):
                return False
            grammar.accept_tokens("walk", [token])
        return 256 in self._allowed(grammar, mask)


def _weight(token: str) -> float:
    """What makes texts short, of few letters, and yet of all kinds."""
    if token == "</s>":
        return 30
    if token in '"}],:':
        return 6
    if token in "ab01":
        return 1
    return 0.15 if (token.isascii() and token.isprintable()) or token in "ĠĊĉč" else 0.01


def verdict_of(trial: Any, schema: Any, **asked: Any) -> dict[str, Any]:
    request = {"outputs": {"json": json.dumps(schema)}, "allowed": None, "mask_ms": 1e9}
    found: dict[str, Any] = trial.run(
        {**request, "compiler": None, "whitespace": WHITESPACE, **asked}
    )
    return found


def validator_of(schema: Any) -> Any:
    default = jsonschema.Draft7Validator if "dependencies" in schema else None
    return jsonschema.validators.validator_for(schema, default or jsonschema.Draft202012Validator)(
        schema
    )


def ids(rows: list[Any]) -> list[str]:
    return [f"{row[0]}-{number}" for number, row in enumerate(rows)]


@pytest.mark.parametrize(("keyword", "schema", "wrong"), ENFORCED, ids=ids(ENFORCED))
def test_texts_are_valid(trial: Any, keyword: str, schema: Any, wrong: list[Any]) -> None:
    verdict = verdict_of(trial, schema)
    assert verdict.get("lost") == (), verdict
    played, chance, judge = Played(trial, verdict), random.Random(keyword), validator_of(schema)
    texts = [text for _ in range(TEXTS) if (text := played.text(chance)) is not None]
    assert texts
    for text in texts:
        judge.validate(json.loads(text))
        assert not re.search(rf"[ \n\r\t]{{{WHITESPACE + 1},}}", re.sub(r'"(\\.|[^"])*"', "", text))
    strictly = judge.evolve(format_checker=jsonschema.FormatChecker())
    for value in wrong:
        assert not strictly.is_valid(value)
        assert not played.allows(json.dumps(value)), value


@pytest.mark.parametrize(("keyword", "schema"), NOT_ENFORCED, ids=ids(NOT_ENFORCED))
def test_what_nobody_enforces_is_named(trial: Any, keyword: str, schema: Any) -> None:
    lost = verdict_of(trial, schema)["lost"]
    assert keyword in {one.keyword for one in lost}


@pytest.mark.parametrize(("keyword", "schema"), ANNOTATIONS, ids=ids(ANNOTATIONS))
def test_annotations_are_ignored(trial: Any, keyword: str, schema: Any) -> None:
    verdict = verdict_of(trial, schema)
    assert verdict["lost"] == ()
    assert Played(trial, verdict).text(random.Random(1)) is not None


NOTHING = {"$defs": {"x": {"not": {}}}}
REFERRED = {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    "schema",
    [{"anyOf": [A, REFERRED], **NOTHING}, {**OBJECT, "anyOf": [{}, REFERRED], **NOTHING}],
    ids=repr,
)
def test_a_part_that_nothing_matches_is_no_reason_to_refuse_the_rest(
    trial: Any, schema: Any
) -> None:
    text = Played(trial, verdict_of(trial, schema)).text(random.Random(1))
    assert text is not None


@pytest.mark.parametrize("schema", [{"not": {}}, {"oneOf": [True, True]}, {"enum": []}], ids=repr)
def test_a_schema_that_nothing_matches_is_refused(trial: Any, schema: Any) -> None:
    assert "refused" in verdict_of(trial, schema)


OF_TOOLS = [
    {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bfoo\b"}}},
    {"type": "object", "properties": {"a": {"type": "number", "exclusiveMinimum": True}}},
    {"type": "object", "properties": {"a": {"type": "any"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    {"type": "object", "properties": 3},
    "no schema",
]


@pytest.mark.parametrize("schema", OF_TOOLS, ids=repr)
def test_tools_with_what_nobody_reads_are_served_without_it(trial: Any, schema: Any) -> None:
    verdict = verdict_of(trial, schema, of_tools=True)
    assert verdict["lost"], verdict
    text = Played(trial, verdict).text(random.Random(1))
    assert text is not None
    json.loads(text)


def test_the_page_says_what_is_enforced() -> None:
    """The table of docs/sampling.md has each keyword that forbids something, in the right row."""
    table = {
        keyword: says.strip()
        for names, says in re.findall(r"^\| (`.*`) \| ([^|]*)\|$", DOCS.read_text(), re.MULTILINE)
        for keyword in re.findall(r"`([^`]+)`", names)
    }
    enforced = {keyword for keyword, _, _ in ENFORCED}
    dropped = {keyword for keyword, _ in NOT_ENFORCED}
    for keyword in enforced - dropped:
        assert table[keyword] == "yes"
    for keyword in enforced & dropped:
        assert table[keyword].startswith("yes, but")
    for keyword in dropped - enforced:
        assert table[keyword] == "no"
    assert table.keys() >= ASSERTIONS
