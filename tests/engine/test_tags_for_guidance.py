"""Structural tags as Lark grammars: llguidance allows what xgrammar allows, token for token.

The tags are those that vLLM makes of tools, for each model whose format can be written so. They are
played with texts that follow them and with texts that almost do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEXTS = 80
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "n": {"type": "integer"}},
    "required": ["city"],
}
ARGUMENTS = ('{"city": "Paris"}', '{"city":"Rome","n":3}', '{ "city" : "x"}', '{"n":1}')
WRONG = ('{"city":"a","z":1}', '{"city": 3}')
ADDED = ["<tool_call>", "</tool_call>", "<think>"]
SPECIAL = [
    *("<|python_tag|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]
MODELS = ("deepseek_r1", "deepseek_v3_1", "hermes", "kimi", "llama", "longcat", "qwen_3")
CHOICES = ("auto", "required", "forced")
XML = ("qwen_3_coder", "qwen_3_5", "mimo", "minimax")
ONLY_XGRAMMAR = ("deepseek_v3_2", "deepseek_v4", "glm_4_7", "hy_v4", "kimi_k3")


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], tags: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **more}


JSON = {"type": "json_schema", "json_schema": SCHEMA}
CALL, TEXT = tag("<f=a>", JSON, "</f>"), {"type": "any_text"}
WRITTEN = {
    "one call": triggered(["<f"], [CALL], stop_after_first=True),
    "at least one": triggered(["<f"], [CALL], at_least_one=True),
    "exactly one": triggered(["<f"], [CALL], at_least_one=True, stop_after_first=True),
    "excluded": triggered(["<f", "<g"], [CALL, tag("<g>", TEXT, "</g>")], excludes=["bad", "<h>"]),
    "no end": triggered(["<f"], [tag("<f>", JSON, "")]),
    "optional": {
        "type": "sequence",
        "elements": [
            {"type": "or", "elements": [CALL, {"type": "const_string", "value": "none"}]},
            {"type": "optional", "content": {"type": "const_string", "value": "<think>"}},
            {"type": "repeat", "min": 1, "max": 2, "content": CALL},
        ],
    },
    "many": {"type": "star", "content": CALL},
    "ends": tag("<x>", TEXT, ["</x>", "END", "</tool_call>"]),
}


class Both:
    """The two compilers, for one tokenizer."""

    def __init__(self, folder: Path) -> None:
        import llguidance.hf
        import xgrammar
        from transformers import AutoTokenizer

        from cfg_core.vllm_plugin.grammar_helper.for_guidance import added_tokens

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        self.tokenizer.add_tokens(ADDED)
        self.size = len(self.tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.size)
        self.xgrammar = xgrammar.GrammarCompiler(info)
        self.llguidance = llguidance.hf.from_tokenizer(self.tokenizer, self.size)
        self.added = added_tokens(self.tokenizer)

    def lark(self, format_: dict[str, Any]) -> str:
        from cfg_core.vllm_plugin.grammar_helper.for_guidance import fields_for_guidance

        whole = json.dumps({"type": "structural_tag", "format": format_})
        fields = fields_for_guidance({"structural_tag": whole}, self.added)
        assert fields["structural_tag"] is None
        return str(fields["grammar"])

    def by_xgrammar(self, format_: dict[str, Any], ids: list[int]) -> tuple[int, bool]:
        """How many of the tokens xgrammar accepts, and whether the text may end then."""
        import xgrammar

        whole = json.dumps({"type": "structural_tag", "format": format_})
        matcher = xgrammar.GrammarMatcher(self.xgrammar.compile_structural_tag(whole))
        accepted = next((i for i, id_ in enumerate(ids) if not matcher.accept_token(id_)), len(ids))
        mask = xgrammar.allocate_token_bitmask(1, self.size)
        matcher.fill_next_token_bitmask(mask, 0)
        word, bit = divmod(self.tokenizer.eos_token_id, 32)
        return accepted, bool((int(mask[0][word]) >> bit) & 1)

    def by_llguidance(self, lark: str, ids: list[int]) -> tuple[int, bool]:
        import llguidance

        matcher = llguidance.LLMatcher(self.llguidance, lark, log_level=0)
        assert not matcher.get_error()
        tried = (i for i, id_ in enumerate(ids) if not matcher.try_consume_tokens([id_]))
        return next(tried, len(ids)), matcher.is_accepting()


@pytest.fixture(scope="module")
def both(model_folder: Callable[[str], Path]) -> Both:
    return Both(model_folder("llama"))


def of_model(model: str, choice: str) -> dict[str, Any]:
    """The format that vLLM or xgrammar makes of two tools."""
    import vllm.entrypoints.openai.chat_completion.protocol  # noqa: F401 - a cycle of imports
    from vllm.tool_parsers import structural_tag_registry as registry
    from xgrammar import get_model_structural_tag
    from xgrammar.openai_tool_call_schema import FunctionToolParam

    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
        for name in ("get_weather", "other")
    ]
    builder = registry._VLLM_STRUCTURAL_TAG_REGISTRY.get(model)
    if builder is not None:
        known = [FunctionToolParam(**tool) for tool in tools]
        made = builder(known[: 1 if choice == "forced" else 2], [], choice, False, "")
    else:
        named = {"type": "function", "function": {"name": "other"}}
        asked = named if choice == "forced" else choice
        made = get_model_structural_tag(model, tools=tools, tool_choice=asked, reasoning=False)
    format_: dict[str, Any] = made.model_dump()["format"]
    return format_


def sample(format_: dict[str, Any], chance: random.Random) -> str:
    """A text that follows the format, but for wrong arguments in some."""
    inner = format_.get("content")
    match format_["type"]:
        case "any_text":
            return chance.choice(("", "hello you", "a <b> {c}"))
        case "const_string":
            return str(format_["value"])
        case "json_schema":
            return chance.choice((*ARGUMENTS, *WRONG))
        case "regex":
            return "37"
        case "or":
            return sample(chance.choice(format_["elements"]), chance)
        case "sequence":
            return "".join(sample(element, chance) for element in format_["elements"])
        case "tag":
            ends = format_["end"]
            end = ends if isinstance(ends, str) else chance.choice(ends)
            return f"{format_['begin']}{sample(inner, chance)}{end}"
        case "optional":
            return chance.choice(("", sample(inner, chance)))
        case "star" | "plus" | "repeat":
            return "".join(sample(inner, chance) for _ in range(chance.choice((1, 2, 3))))
        case "tags_with_separator":
            calls = [sample(chance.choice(format_["tags"]), chance) for _ in range(2)]
            return str(format_["separator"]).join(calls[: chance.randrange(3)])
        case "triggered_tags":
            calls = [chance.choice(("", "ok ")) + sample(t, chance) for t in format_["tags"]]
            return "".join(calls[: chance.randrange(3)]) + chance.choice(("", " bye", "<think>x"))
    raise AssertionError(format_["type"])


def damaged(text: str, chance: random.Random) -> str:
    """The text, or the text cut, or with one character more or less."""
    at = chance.randrange(len(text) + 1)
    return chance.choice(
        (
            text,
            text[:at],
            text[:at] + chance.choice('x<{" ') + text[at:],
            text[:at] + text[at + 1 :],
        )
    )


def differences(both: Both, format_: dict[str, Any]) -> list[str]:
    chance, lark = random.Random(5), both.lark(format_)
    texts = [damaged(sample(format_, chance), chance) for _ in range(TEXTS)]
    tokens = {text: both.tokenizer.encode(text, add_special_tokens=False) for text in texts}
    return [
        text
        for text, ids in tokens.items()
        if both.by_xgrammar(format_, ids) != both.by_llguidance(lark, ids)
    ]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model", MODELS)
def test_both_compilers_allow_the_same_calls(both: Both, model: str, choice: str) -> None:
    assert differences(both, of_model(model, choice)) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_both_compilers_allow_the_same_of_other_formats(both: Both, name: str) -> None:
    assert differences(both, WRITTEN[name]) == []


OPENINGS = {"qwen_xml": "<parameter={}>", "minimax_xml": '<parameter name="{}">'}
PARAMETERS = (
    (("city", "Paris"),),
    (("city", "\nRome <b> & more\n"), ("n", "3")),
    (("city", " x "), ("n", " -4 "), ("kind", "big")),
    (("city", "y"), ("n", "4"), ("kind", "\nbig\n"), ("deep", '{"a": "</b>"}'), ("free", "{\n}")),
    (("city", "z"), ("free", "")),
)
WRONG_PARAMETERS = (
    (("n", "3"), ("city", "Paris")),
    (("city", "Paris"), ("n", "three")),
    (("city", "Paris"), ("kind", "none")),
    (("city", "Paris"), ("other", "1")),
    (("city", "much too long a name of a city, which has more than thirty characters"),),
)


def xml(style: str, values: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"{OPENINGS[style].format(k)}{value}</parameter>" for k, value in values)


def whole_calls(format_: dict[str, Any], values: tuple[tuple[str, str], ...]) -> str:
    """A text with one call that has these parameters."""
    match format_["type"]:
        case "json_schema":
            return xml(format_["style"], values)
        case "tag":
            return f"{format_['begin']}{whole_calls(format_['content'], values)}{format_['end']}"
        case "sequence":
            return "".join(whole_calls(element, values) for element in format_["elements"])
        case "const_string":
            return str(format_["value"])
    return whole_calls(format_["tags"][0], values)


def with_more_parameters(format_: Any) -> Any:
    """The format with an enumeration, an object and free text among the parameters."""
    if isinstance(format_, list):
        return [with_more_parameters(item) for item in format_]
    if not isinstance(format_, dict):
        return format_
    if format_.get("type") == "json_schema":
        inner = {"type": "object", "properties": {"a": {"type": "string"}}}
        more = {"kind": {"enum": ["big", "bigger", 3]}, "deep": inner, "free": {}}
        schema = {**SCHEMA, "properties": {**SCHEMA["properties"], **more}}
        return {**format_, "json_schema": schema}
    return {key: with_more_parameters(value) for key, value in format_.items()}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model", XML)
def test_parameters_between_xml_marks(both: Both, model: str, choice: str) -> None:
    """Calls that follow the schema are allowed by both. No call is allowed by llguidance alone.

    xgrammar lets text of a bounded length contain the mark that ends it, and llguidance does not.
    """
    format_ = with_more_parameters(of_model(model, choice))
    lark, chance = both.lark(format_), random.Random(5)
    right = [whole_calls(format_, values) for values in PARAMETERS]
    wrong = [whole_calls(format_, values) for values in WRONG_PARAMETERS]
    for text in right:
        ids = both.tokenizer.encode(text, add_special_tokens=False)
        assert both.by_xgrammar(format_, ids) == both.by_llguidance(lark, ids), text
        assert both.by_llguidance(lark, ids)[0] == len(ids)
    for text in [*wrong, *(damaged(t, chance) for t in right * 8)]:
        ids = both.tokenizer.encode(text, add_special_tokens=False)
        accepted, may_end = both.by_llguidance(lark, ids)
        by_xgrammar, may_end_there = both.by_xgrammar(format_, ids)
        assert accepted <= by_xgrammar, text
        assert accepted < by_xgrammar or may_end_there or not may_end, text
    for text in wrong:
        ids = both.tokenizer.encode(text, add_special_tokens=False)
        assert both.by_llguidance(lark, ids)[0] < len(ids), text


@pytest.mark.parametrize("model", ONLY_XGRAMMAR)
def test_what_only_xgrammar_has_is_said(both: Both, model: str) -> None:
    from cfg_core.vllm_plugin.grammar_helper.lark_text import NotExpressibleError

    with pytest.raises(NotExpressibleError, match="Only xgrammar has"):
        both.lark(of_model(model, "auto"))


def test_the_old_format_is_read(both: Both) -> None:
    from cfg_core.vllm_plugin.grammar_helper.for_guidance import fields_for_guidance

    old = {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]}
    fields = fields_for_guidance({"structural_tag": json.dumps(old)}, both.added)
    assert fields["grammar"] == both.lark(triggered(["<f"], [CALL]))
