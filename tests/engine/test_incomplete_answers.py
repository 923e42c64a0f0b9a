"""Answers that were cut: whole ones and streams tell the same, on each endpoint.

And messages that end with the assistant's, which the model continues.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cfg_core.errors import NotFoundError, RequestError
from tests.engine.in_process_server import Server

MODEL = Path(__file__).parents[2] / "models" / "stories"
USER = {"role": "user", "content": "What is the weather in Paris?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": CITY}
GUIDED = {"guidance_scale": 2.0, "negative_prompt": "Be dull."}
CHAT: dict[str, Any] = {
    "messages": [USER],
    "temperature": 0,
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSE: dict[str, Any] = {
    "input": [USER],
    "temperature": 0,
    "tools": [{"type": "function", **FUNCTION}],
}
MESSAGE: dict[str, Any] = {
    "model": MODEL.name,
    "messages": [USER],
    "temperature": 0,
    "tools": [{"name": "get_weather", "input_schema": CITY}],
}
NAMED = {
    "chat": {"type": "function", "function": {"name": "get_weather"}},
    "responses": {"type": "function", "name": "get_weather"},
    "messages": {"type": "tool", "name": "get_weather"},
}
FORCED = {"chat": "required", "responses": "required", "messages": {"type": "any"}}
LENGTHS = (1, 3, 5, 8, 12, 16, 24)
"""Output tokens: in the markup, in the name, in the arguments."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(MODEL, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"})
    yield server
    server.close()


def events(server: Server, endpoint: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = "".join(server.ask({**body, "stream": True}, endpoint=endpoint))
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --- chats


def told(server: Server, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """What a chat tells: its text, its calls without their ids, and how it ended."""
    if not stream:
        (choice,) = server.answer(body)["choices"]
        calls = choice["message"].get("tool_calls", [])
        return {
            "text": choice["message"]["content"] or "",
            "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
            "finish": choice["finish_reason"],
        }
    text, finish, found = "", None, {}
    for chunk in events(server, "chat", body):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls", []):
                name, arguments = found.setdefault(call["index"], ["", ""])
                function = call["function"]
                found[call["index"]] = [
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                ]
    return {"text": text, "calls": [tuple(call) for call in found.values()], "finish": finish}


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("choice", ["required", NAMED["chat"], "auto"], ids=["any", "one", "auto"])
def test_a_chat_that_was_cut_in_a_call(
    server: Server, choice: Any, guidance: dict[str, Any]
) -> None:
    for length in LENGTHS:
        body = {**CHAT, "tool_choice": choice, "max_tokens": length, **guidance}
        whole, streamed = (told(server, body, stream) for stream in (False, True))
        assert whole == streamed, length
        if choice != "auto":
            assert whole["text"] == ""
            assert "<tool_call>" not in str(whole)
            assert whole["finish"] == "length"


def test_a_call_that_a_stop_string_cuts(server: Server) -> None:
    body = {**CHAT, "tool_choice": "required", "max_tokens": 24, "stop": ["name"]}
    whole, streamed = (told(server, body, stream) for stream in (False, True))
    assert whole == streamed == {"text": "", "calls": [], "finish": "stop"}


def test_several_choices_are_told_one_by_one(server: Server) -> None:
    body = {**CHAT, "tool_choice": "required", "max_tokens": 4, "n": 2, "temperature": 1}
    for choice in server.answer(body)["choices"]:
        assert not choice["message"]["content"]
        assert choice["finish_reason"] == "length"


# --- messages


@pytest.mark.parametrize("choice", [FORCED["messages"], NAMED["messages"]], ids=["any", "one"])
def test_a_message_that_was_cut_in_a_call(server: Server, choice: Any) -> None:
    for length in LENGTHS:
        body = {**MESSAGE, "tool_choice": choice, "max_tokens": length}
        whole = server.answer(body, endpoint="messages")
        assert whole["stop_reason"] == "max_tokens"
        assert "tool_call" not in str(whole)
        assert not any("text" in block for block in whole["content"])
        calls = [block for block in whole["content"] if block["type"] == "tool_use"]
        assert all(isinstance(block["input"], dict) for block in calls)
        streamed = events(server, "messages", body)
        starts = [e["content_block"] for e in streamed if e["type"] == "content_block_start"]
        names = [
            [b["name"] for b in blocks if b["type"] == "tool_use"] for blocks in (calls, starts)
        ]
        assert names[0] == names[1]
        (delta,) = [event for event in streamed if event["type"] == "message_delta"]
        assert delta["delta"]["stop_reason"] == "max_tokens"


# --- responses


@pytest.mark.parametrize("choice", [FORCED["responses"], NAMED["responses"]], ids=["any", "one"])
def test_a_response_that_was_cut_in_a_call(server: Server, choice: Any) -> None:
    for length in LENGTHS:
        body = {**RESPONSE, "tool_choice": choice, "max_output_tokens": length}
        whole = server.answer(body, endpoint="responses")
        *_, last = events(server, "responses", body)
        assert last["type"] == "response.incomplete"
        for response in (whole, last["response"]):
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert "tool_call>" not in str(response["output"])
            assert [item["type"] for item in response["output"]] in ([], ["function_call"])
            assert all(item["status"] == "incomplete" for item in response["output"])
        shown = [
            [(item["name"], item["arguments"]) for item in response["output"]]
            for response in (whole, last["response"])
        ]
        assert shown[0] == shown[1], length


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
def test_a_text_that_was_cut(server: Server, guidance: dict[str, Any]) -> None:
    body = {"input": "Tell me a story.", "max_output_tokens": 4, "temperature": 0, **guidance}
    whole = server.answer(body, endpoint="responses")
    made = events(server, "responses", body)
    done = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["incomplete"]
    assert made[-1]["type"] == "response.incomplete"
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    for response in (whole, made[-1]["response"]):
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        assert (response.get("guidance") is not None) == bool(guidance)


def test_a_text_that_ended_is_completed(server: Server) -> None:
    body = {"input": "Tell me a story.", "max_output_tokens": 9, "temperature": 0}
    story = server.answer(body, endpoint="responses")["output"][0]["content"][0]["text"]
    body["stop"] = story.split()[-2]
    whole = server.answer(body, endpoint="responses")
    made = events(server, "responses", body)
    assert made[-1]["type"] == "response.completed"
    for response in (whole, made[-1]["response"]):
        assert response["status"] == "completed"
        assert [item["status"] for item in response["output"]] == ["completed"]


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_to_go_on_from_is_not_found(
    server: Server, guidance: dict[str, Any], stream: bool
) -> None:
    body = {"input": "x", "previous_response_id": "resp_1", "stream": stream, **guidance}
    with pytest.raises(NotFoundError, match="'resp_1' not found"):
        server.answer(body, endpoint="responses")


# --- messages that end with the assistant's


def message(server: Server, *messages: dict[str, Any], **more: Any) -> str:
    body = {"model": MODEL.name, "max_tokens": 8, "temperature": 0, "messages": list(messages)}
    return server.answer({**body, **more}, endpoint="messages")["content"][0]["text"]


def chat(server: Server, *messages: dict[str, Any], **more: Any) -> str:
    body = {"max_tokens": 8, "temperature": 0, "messages": list(messages)}
    return server.answer({**body, **more})["choices"][0]["message"]["content"]


BEGUN = {"role": "assistant", "content": "The best answer is ("}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize(
    "begun",
    [BEGUN["content"], [{"type": "text", "text": BEGUN["content"]}]],
    ids=["text", "blocks"],
)
def test_the_last_message_is_continued(
    server: Server, guidance: dict[str, Any], begun: Any
) -> None:
    last = {"role": "assistant", "content": begun}
    text = message(server, USER, last, **guidance)
    assert text == chat(server, USER, BEGUN, **CONTINUED, **guidance)
    assert text != chat(server, USER, BEGUN, **guidance)
    body = {"model": MODEL.name, "max_tokens": 8, "temperature": 0, "messages": [USER, last]}
    deltas = [event.get("delta", {}) for event in events(server, "messages", {**body, **guidance})]
    assert "".join(delta.get("text", "") for delta in deltas) == text


def test_a_message_says_that_no_stop_sequence_was_met(server: Server) -> None:
    body = {"model": MODEL.name, "max_tokens": 4, "messages": [USER]}
    assert server.answer(body, endpoint="messages")["stop_sequence"] is None


def test_a_message_without_text_is_a_new_turn(server: Server) -> None:
    empty = {"role": "assistant", "content": ""}
    assert message(server, USER, empty) == message(server, USER)


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
def test_white_space_at_the_end_is_refused(server: Server, guidance: dict[str, Any]) -> None:
    last = {"role": "assistant", "content": "The best "}
    with pytest.raises(RequestError, match="white space") as raised:
        message(server, USER, last, **guidance)
    assert raised.value.param == "messages[1].content"


@pytest.mark.parametrize("more", [{}, CONTINUED], ids=["new", "continued"])
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_guided_chat_is_echoed(
    server: Server, more: dict[str, Any], logprobs: dict[str, Any], stream: bool
) -> None:
    own = {"messages": [USER, BEGUN], "temperature": 0, "max_tokens": 5, **GUIDED, **more}
    body = {**own, **logprobs}
    text = told(server, body, stream)["text"]
    echoed = told(server, {**body, "echo": True}, stream)["text"]
    assert echoed == BEGUN["content"] + text
