"""Errors of bodies name the field that is wrong, over all unions of vLLM's requests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from cfg_core.errors import RequestError
from deployments.generator.refusals.validation import parse

USER = {"role": "user", "content": "Hi"}
SECRET = "mauve walrus"


def messages(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def parts(*parts: Any) -> dict[str, Any]:
    return messages(USER, {"role": "user", "content": list(parts)})


def answers(*messages: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [USER, *messages]}


CHATS = [
    # fields beside a conversation, the field at fault, words of the sentence
    (messages({"role": "user", "content": None}), "messages[0].content", "a string or a list"),
    (messages({"role": "user", "content": 5}), "messages[0].content", "not a number"),
    (messages(USER, {"content": SECRET}), "messages[1].role", "required"),
    (messages({"role": 5, "content": SECRET}), "messages[0].role", "must be a string"),
    (messages({"role": "other", "content": 5}), "messages[0].content", "a string or a list"),
    (messages(SECRET), "messages[0]", "must be an object, not a string"),
    ({"messages": SECRET}, "messages", "must be a list"),
    ({}, "messages", "required"),
    (parts(SECRET), "messages[1].content[0]", "must be an object, not a string"),
    (parts({"text": SECRET}), "messages[1].content[0].type", "required"),
    (parts({"type": "text"}), "messages[1].content[0].text", "required"),
    (parts({"type": "text", "text": 5}), "messages[1].content[0].text", "must be a string"),
    (parts({"type": "banana"}), "messages[1].content[0].type", "'text', 'image_url'"),
    (
        parts({"type": "image_url", "image_url": 5}),
        "messages[1].content[0].image_url",
        "must be an object",
    ),
    (
        parts({"type": "video_url", "video_url": {"url": "x"}}, 5),
        "messages[1].content[1]",
        "must be an object",
    ),
    (
        messages({"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}),
        "messages[0].tool_calls[0].type",
        "required",
    ),
    (
        messages({"role": "assistant", "tool_calls": [{"id": "x", "type": "function"}]}),
        "messages[0].tool_calls[0].function",
        "required",
    ),
    ({"response_format": {"type": "banana"}}, "response_format.type", "'json_object'"),
    ({"response_format": {"type": 5}}, "response_format.type", "'json_object'"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "required",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"function": {"name": 5}}]}, "tools[0].function.name", "must be a string"),
    ({"tools": SECRET}, "tools", "must be a list"),
    ({"stop": 5}, "stop", "a string or a list"),
    ({"stop": ["a", 5]}, "stop[1]", "must be a string"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "must be a number"),
    ({"temperature": "hot"}, "temperature", "must be a number, not a string"),
    ({"reasoning_effort": "banana"}, "reasoning_effort", "'low'"),
    (
        {"stream": True, "stream_options": {"include_usage": "x"}},
        "stream_options.include_usage",
        "",
    ),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "must be an object"),
]
RESPONSES = [
    ({"input": 5}, "input", "a string or a list"),
    ({}, "input", "required"),
    ({"input": [SECRET]}, "input[0]", "must be an object"),
    ({"input": [{}]}, "input[0].type", "required"),
    ({"input": [{"type": "banana"}]}, "input[0].type", "'function_call'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content", "not null"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "required",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "banana"}]}]},
        "input[0].content[0].type",
        "'input_text'",
    ),
    (
        {"input": [{"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}]},
        "input[0].content[0].text",
        "required",
    ),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].arguments", "required"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"input": "x", "tools": [{"type": "banana"}]}, "tools[0].type", "'function'"),
    ({"input": "x", "tool_choice": "banana"}, "tool_choice", "'none', 'auto', 'required'"),
    ({"input": "x", "text": {"format": {"type": "banana"}}}, "text.format.type", "'json_schema'"),
    ({"input": "x", "reasoning": {"effort": "banana"}}, "reasoning.effort", "'low'"),
    ({"input": "x", "include": ["banana"]}, "include[0]", "must be one of"),
    ({"input": "x", "metadata": {"a": 5}}, "metadata.a", "must be a string"),
]
MESSAGES = [
    (messages(USER), "model", "required"),
    (answers({"role": "user", "content": None}), "messages[1].content", "a string or a list"),
    (answers({"role": "tool", "content": SECRET}), "messages[1].role", "'assistant'"),
    (answers({"role": "user", "content": [SECRET]}), "messages[1].content[0]", "an object"),
    (
        answers({"role": "user", "content": [{"type": "banana"}]}),
        "messages[1].content[0].type",
        "'tool_use'",
    ),
    (
        answers({"role": "user", "content": [{"type": "text", "text": 5}]}),
        "messages[1].content[0].text",
        "must be a string",
    ),
    (
        answers({"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "x"}}]}),
        "messages[1].content[0].tool.type",
        "'tool_reference'",
    ),
    (answers() | {"system": [{"type": "text", "text": 5}]}, "system[0].text", "must be a string"),
    (answers() | {"tools": [{"name": "x"}]}, "tools[0].input_schema", "required"),
    (answers() | {"tool_choice": {"type": "banana"}}, "tool_choice.type", "'any'"),
    (answers() | {"tool_choice": {"type": "tool"}}, "tool_choice", "name is required"),
    (answers() | {"thinking": {"type": "on"}}, "thinking.type", "'adaptive'"),
    (answers() | {"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "required"),
    (answers() | {"stop_sequences": SECRET}, "stop_sequences", "must be a list"),
    (
        answers() | {"output_config": {"format": {"type": "banana"}}},
        "output_config.format.type",
        "'json_schema'",
    ),
]
COMPLETIONS = [
    ({"prompt": 7}, "prompt", "must be a list or a string"),
    ({"prompt": ["a", 5]}, "prompt[1]", "must be a string"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]", "must be a number"),
]
CASES = [
    *((ChatCompletionRequest, {**messages(USER), **b} if b else b, *c) for b, *c in CHATS),
    *((ResponsesRequest, *case) for case in RESPONSES),
    *((AnthropicMessagesRequest, *case) for case in MESSAGES),
    *((CompletionRequest, *case) for case in COMPLETIONS),
    (
        BatchChatCompletionRequest,
        {"messages": [[USER], [{"role": "user", "content": [SECRET]}]]},
        "messages[1][0].content[0]",
        "must be an object",
    ),
]


@pytest.mark.parametrize(("model", "body", "field", "words"), CASES, ids=lambda x: str(x)[:60])
def test_the_error_names_the_field(
    model: Any, body: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(RequestError) as raised:
        parse(model, copy.deepcopy(body))
    assert raised.value.param == field
    assert str(raised.value).startswith(f"{field}: ")
    assert words in str(raised.value)
    assert SECRET not in str(raised.value)


GOOD = [
    parts({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}),
    parts({"type": "video_url", "video_url": {"url": "x"}}),
    messages({"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "x"}]}),
    messages(USER) | {"tools": None, "stop": None, "n": None, "response_format": None},
]


@pytest.mark.parametrize("body", GOOD, ids=lambda x: str(x)[:60])
def test_good_bodies_pass(body: dict[str, Any]) -> None:
    request = parse(ChatCompletionRequest, copy.deepcopy(body))
    contents = [message["content"] for message in request.messages]
    assert contents == [message["content"] for message in body["messages"]]
