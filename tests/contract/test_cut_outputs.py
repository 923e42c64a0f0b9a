"""What is read of an output that was cut, without an engine; tests/engine has the answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from deployments.generator.answers.incomplete import as_object, read_as_stream

MODEL = Path(__file__).parents[2] / "models" / "stories"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}],
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Par'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize(
    ("text", "choice", "content", "calls"),
    [
        ('<tool_call>\n{"name"', "required", None, []),
        ("<tool", "required", None, []),
        (CALL, "required", None, [("find", '{"city": "Par')]),
        (
            CALL,
            {"type": "function", "function": {"name": "find"}},
            None,
            [("find", '{"city": "Par')],
        ),
        ("Hello " + CALL, "auto", "Hello ", [("find", '{"city": "Par')]),
        ("Hello <tool_call>", "auto", "Hello ", []),
        ("Hello", "auto", "Hello", []),
        ("1 <", "auto", "1 <", []),
        ("the tag <tool", "auto", "the tag <tool", []),
    ],
)
def test_a_cut_output_is_read_as_its_stream(
    tokenizer: Any, text: str, choice: Any, content: str | None, calls: list[tuple[str, str]]
) -> None:
    parser = ParserManager.get_parser(
        tool_parser_name="hermes",
        reasoning_parser_name="",
        enable_auto_tools=True,
        tool_strict_level="parameter",
        model_name=MODEL.name,
        is_harmony=False,
        tokenizer=tokenizer,
    )
    assert parser is not None
    request = ChatCompletionRequest(**BODY, tool_choice=choice)
    output: Any = SimpleNamespace(text=text, token_ids=tokenizer.encode(text))
    one = parser(tokenizer, request.tools, chat_template_kwargs={}, model_config=None)
    read = read_as_stream(one, output, request, [1])
    assert read.content == content
    assert [(call.name, call.arguments) for call in read.calls] == calls


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("", {}),
        ("{", {}),
        ("no JSON", {}),
        ('"text"', {}),
    ],
)
def test_arguments_that_were_cut_are_an_object(arguments: str, found: dict[str, Any]) -> None:
    assert json.loads(as_object(arguments)) == found
