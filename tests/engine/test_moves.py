"""A replica goes on with streams that another one has begun.

Both are one server here: a stream is read as far as its n-th item, dropped, and sent again with
what was told until then. What the client has got by then, and what the ingress lets through of the
second answer, must be the undisturbed stream.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cfg_core.errors import EngineError
from deployments.generator.engine.calls import REPLAYED_AT_ONCE
from deployments.generator.heartbeats import with_heartbeats
from deployments.messages import Chunk, GenerateCall, Heartbeat
from deployments.requests.group import group_request
from deployments.requests.guidance_fields import read_guidance
from deployments.requests.progress import Told
from deployments.requests.streams import streams_of
from deployments.requests.usage import Meter, Usage
from tests.engine.in_process_server import Server

MODEL = Path(__file__).parents[2] / "models" / "stories"
STORY = "Once upon a time there was a little dog who"
GUIDED = {"guidance_scale": 1.5, "negative_prompt": "The king of the hill had a"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USAGE = {"stream_options": {"include_usage": True}}
USER = {"role": "user", "content": STORY}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": STORY},
    "guided": {"prompt": STORY, **GUIDED, **USAGE},
    "seeded": {"prompt": STORY, "temperature": 1.0, "seed": 3, **GUIDED},
    "choices": {"prompt": STORY, "temperature": 1.0, "seed": 5, "n": 3, **GUIDED, **USAGE},
    "stop": {"prompt": STORY, "n": 2, "seed": 5, "temperature": 1.0, "stop": ["e a", "and"]},
    "logprobs": {"prompt": STORY, "logprobs": 2, **GUIDED},
    "window": {"prompt": STORY, **GUIDED, "guidance_start": 2, "guidance_end": 6},
    "limits": {"prompt": STORY, **GUIDED, "guidance_max_kl": 0.2, "guidance_min_entropy": 0.5},
    "chat": {"messages": [USER], "guidance_scale": 1.5, "negative_prompt": "Be dull.", **USAGE},
    "tool": {
        "messages": [USER],
        "max_tokens": 30,
        **GUIDED,
        "tools": [{"type": "function", "function": {"name": "tell", "parameters": CITY}}],
        "tool_choice": {"type": "function", "function": {"name": "tell"}},
    },
    "json": {
        "messages": [USER],
        "max_tokens": 30,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(MODEL, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"})
    yield server
    server.close()


def call_of(body: dict[str, Any], endpoint: Any = None) -> GenerateCall:
    endpoint = endpoint or ("chat" if "messages" in body else "completion")
    guidance = read_guidance(body, endpoint)
    return GenerateCall(
        endpoint=endpoint,
        body={"max_tokens": 10, "temperature": 0, **body, "stream": True},
        guidance=guidance,
        group=group_request(endpoint, body, streams_of(endpoint, body, guidance)),
        headers={"x-request-id": "the-same"},
    )


async def read(server: Server, call: GenerateCall, most: int = 1000) -> list[Chunk]:
    """The first items of an answer. Leaving it aborts its request."""
    found: list[Chunk] = []
    async with aclosing(server.vllm.generate(call, Meter())) as items:
        async for item in items:
            found.append(item)
            if len(found) == most:
                break
    return found


def told(texts: list[str]) -> list[Any]:
    """The events, with the time of their creation replaced, and pieces of a text joined."""
    lines = [line.removeprefix("data: ") for line in "".join(texts).split("\n\n") if line]
    created, choices, rest = set(), {}, []
    for line in lines:
        event = {} if line == "[DONE]" else json.loads(line)
        created.add(event.pop("created", None))
        for one in event.pop("choices", []):
            said = choices.setdefault(one["index"], {"text": "", "roles": 0, "ends": []})
            delta = one.get("delta", {})
            said["text"] += one.get("text") or delta.get("content") or ""
            for called in delta.get("tool_calls") or ():
                said["text"] += called["function"].get("arguments") or ""
                said.setdefault("tools", []).append((called["index"], "id" in called))
            said["roles"] += "role" in delta
            if one.get("finish_reason"):
                said["ends"].append((one["finish_reason"], one.get("stop_reason")))
        rest.append({name: value for name, value in event.items() if name in ("usage", "guidance")})
    assert len(created - {None}) == 1
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [choices, [one for one in rest if any(one.values())]]


@pytest.mark.parametrize("name", BODIES)
def test_the_stream_is_the_undisturbed_one(server: Server, name: str) -> None:
    call = call_of(BODIES[name])
    whole = told([item.text for item in server.run(read(server, call))])
    for most in (1, 2, 4, 7, 9):
        first = server.run(read(server, call, most))
        if first[-1].text.endswith("[DONE]\n\n"):
            continue
        has = Told(checks_texts="logprobs" not in BODIES[name])
        for item in first:
            has.note(item.text, item.progress)
        begun = has.begun()
        assert begun is not None
        unseen = has.unseen()
        second = server.run(read(server, replace(call, begun=begun)))
        texts = [*(item.text for item in first), *(unseen.of(item.text) for item in second)]
        assert told(texts) == whole, most
    server.assert_idle()


WHOLE = {
    **{name: body for name, body in BODIES.items() if name != "logprobs"},
    "long stop": {**BODIES["plain"], "stop": ["not in the text"], "max_tokens": 30},
}


OF_ONE_ANSWER = {"id", "created", "created_at", "request_id"}


def whole_of(text: str) -> Any:
    """An answer in one piece, without what each answer has of its own."""
    return json.loads(
        text,
        object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in OF_ONE_ANSWER},
    )


async def read_until(
    server: Server, call: GenerateCall, has: Told, tokens: int
) -> tuple[str, Usage]:
    """Read an answer in one piece, until `has` knows of so many tokens; "" if it is left then."""
    meter = Meter()
    recorder = server.vllm.recorder(call, meter)
    items = server.vllm.generate(call, meter, None, recorder)
    text = ""
    async with aclosing(
        with_heartbeats(items, lambda: meter.usage, 0.001, recorder.take_whole)
    ) as told_items:
        async for item in told_items:
            if not isinstance(item, Heartbeat):
                text += item.text
                continue
            has.note_heartbeat(item.progress)
            begun = has.begun()
            if begun is not None and begun.outputs.num_tokens >= tokens:
                return "", meter.usage
    return text, meter.usage


@pytest.mark.parametrize("name", [*WHOLE, "messages", "responses"])
def test_an_answer_in_one_piece_is_the_undisturbed_one(server: Server, name: str) -> None:
    """Left after some tokens, and again where it went on."""
    guided = {"guidance_scale": 1.5, "negative_prompt": "Be dull."}
    if name == "messages":
        call = call_of({"model": "stories", "messages": [USER], **guided}, "messages")
    elif name == "responses":
        call = call_of({"input": STORY, "max_output_tokens": 10, **guided}, "responses")
        del call.body["max_tokens"]
    else:
        call = call_of(WHOLE[name])
    call = replace(call, body={**call.body, "stream": False})
    call.body.pop("stream_options", None)
    want, _ = server.run(read_until(server, call, Told(), 10**6))
    for cuts in ((1,), (3, 6), (5, 6, 7)):
        has = Told()
        for cut in cuts:
            begun = has.begun()
            text, _ = server.run(read_until(server, replace(call, begun=begun), has, cut))
            if text:
                break
        else:
            begun = has.begun()
            assert begun is not None
            assert begun.outputs.num_tokens >= cuts[-1]
            before = begun.counts.output_tokens
            text, usage = server.run(read_until(server, replace(call, begun=begun), has, 10**6))
            assert usage.output_tokens > before > 0
        assert whole_of(text) == whole_of(want), cuts
    server.assert_idle()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [STORY, "The king"]},
        {"prompt": STORY, "logprobs": 1},
        {"prompt": STORY, "n": 2, "use_beam_search": True},
    ],
)
def test_of_other_answers_in_one_piece_nothing_is_told(
    server: Server, body: dict[str, Any]
) -> None:
    call = call_of(body)
    call = replace(call, body={**call.body, "stream": False})
    has = Told()
    text, _ = server.run(read_until(server, call, has, 1))
    assert text
    assert has.begun() is None


MESSAGES: dict[str, dict[str, Any]] = {
    "guided": {"guidance_scale": 1.5, "negative_prompt": "Be dull."},
    "tool": {
        "max_tokens": 30,
        "tools": [{"name": "tell", "input_schema": CITY}],
        "tool_choice": {"type": "tool", "name": "tell"},
    },
}


def of_messages(texts: list[str]) -> list[Any]:
    """The events of Anthropic's API, with pieces of a text joined. A tool has the one random id."""
    whole = "".join(texts)
    ids = set(re.findall(r"chatcmpl-tool-[0-9a-f]{16}", whole))
    assert len(ids) <= 1
    lines = re.sub(r"(chatcmpl-tool)-[0-9a-f]{16}", r"\1", whole).split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    pieces = [delta["partial_json" if "partial_json" in delta else "text"] for delta in deltas]
    return ["".join(pieces), [e for e in events if e["type"] != "content_block_delta"]]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_the_undisturbed_one(server: Server, name: str) -> None:
    call = call_of({"model": "stories", "messages": [USER], **MESSAGES[name]}, "messages")
    whole = of_messages([item.text for item in server.run(read(server, call))])
    for most in (1, 3, 6):
        first = server.run(read(server, call, most))
        has = Told()
        for item in first:
            has.note(item.text, item.progress)
        unseen = has.unseen()
        second = server.run(read(server, replace(call, begun=has.begun())))
        texts = [*(item.text for item in first), *(unseen.of(item.text) for item in second)]
        assert of_messages(texts) == whole, most
    server.assert_idle()


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"guidance_scale": 1.5, "negative_prompt": "Be dull."},
    "json": {"text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}}},
    "seeded": {"temperature": 1.0, "seed": 3, "guidance_scale": 1.5, "negative_prompt": "Dull."},
    "tool": {
        "tools": [{"type": "function", "name": "tell", "parameters": CITY}],
        "tool_choice": {"type": "function", "name": "tell"},
        "max_output_tokens": 60,
    },
}
PIECES = ("response.output_text.delta", "response.function_call_arguments.delta")


def of_responses(texts: list[str]) -> tuple[list[Any], str]:
    """The events of the Responses API with pieces of a text joined, and the text of their pieces.

    Ids are numbers, in the order in which they come. The one time is 0.
    """
    whole = "".join(texts)
    created = set(re.findall(r'"created_at":(\d+)', whole))
    assert len(created) == 1
    whole = whole.replace(f'"created_at":{created.pop()}', '"created_at":0')
    ids = dict.fromkeys(re.findall(r'"[\w-]+[_-][0-9a-f]{16}"', whole))
    for number, one in enumerate(ids):
        whole = whole.replace(one, f'"{one[1:-17]}{number}"')
    events = [json.loads(x.partition("data: ")[2]) for x in whole.split("\n\n") if x]
    numbers = [event.pop("sequence_number") for event in events]
    assert numbers == list(range(len(events)))
    pieces = [event for event in events if event["type"] in PIECES]
    assert len({(piece["item_id"], piece["output_index"]) for piece in pieces}) == 1
    rest = [event for event in events if event not in pieces]
    return rest, "".join(piece["delta"] for piece in pieces)


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_the_undisturbed_one(server: Server, name: str) -> None:
    """Left once, and once more where it went on: ids and the time stay those of the first.

    The first two events come before the first token.
    """
    call = call_of({"input": STORY, "max_output_tokens": 12, **RESPONSES[name]}, "responses")
    del call.body["max_tokens"]
    whole = of_responses([item.text for item in server.run(read(server, call))])
    assert whole[0][-1]["type"] in ("response.completed", "response.incomplete")
    for cuts in ((1,), (5,), (2, 1, 4), (6, 9), (8, 4, 12)):
        has, unseen, texts = Told(), None, list[str]()
        for cut in (*cuts, 1000):
            begun = has.begun() if texts else None
            assert (begun is not None) == bool(texts)
            unseen = has.unseen()
            for item in server.run(read(server, replace(call, begun=begun), cut)):
                text = unseen.of(item.text)
                has.note(text, item.progress)
                texts.append(text)
        assert of_responses(texts) == whole, cuts
    server.assert_idle()


def test_a_response_with_log_probabilities_is_not_moved(server: Server) -> None:
    """Its last event has those of the whole text."""
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    call = call_of({"input": STORY, "max_output_tokens": 4, **more}, "responses")
    del call.body["max_tokens"]
    has = Told()
    for item in server.run(read(server, call, 6)):
        has.note(item.text, item.progress)
    assert has.events > 4
    assert has.begun() is None


def test_a_stream_that_was_begun_with_other_weights_is_refused(server: Server) -> None:
    call = call_of(BODIES["plain"])
    has = Told()
    for item in server.run(read(server, call, 3)):
        has.note(item.text, item.progress)
    begun = has.begun()
    assert begun is not None
    assert len(begun.model) == 32
    with pytest.raises(EngineError, match="other weights"):
        server.run(read(server, replace(call, begun=replace(begun, model="other"))))
    server.assert_idle()


def test_a_client_that_leaves_in_the_replay_leaves_nothing_behind(server: Server) -> None:
    call = call_of({**BODIES["choices"], "max_tokens": 30})
    has = Told()
    for item in server.run(read(server, call, 12)):
        has.note(item.text, item.progress)
    for most in (1, 3, 6, 12, 14):
        server.run(read(server, replace(call, begun=has.begun()), most))
    server.run(asyncio.sleep(0.1))
    server.assert_idle()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [STORY, "The king"]},
        {"prompt": STORY, "echo": True, "logprobs": 1},
    ],
)
def test_of_other_streams_nothing_is_told(server: Server, body: dict[str, Any]) -> None:
    items = server.run(read(server, call_of(body)))
    assert {item.progress for item in items} == {None}


def test_others_have_their_turn_while_a_long_stream_is_read_again(server: Server) -> None:
    call = call_of({"prompt": STORY, "max_tokens": 230, "ignore_eos": True})
    has = Told()
    for item in server.run(read(server, call, 210)):
        has.note(item.text, item.progress)
    call, turn, turns = replace(call, begun=has.begun()), 0, list[int]()

    async def others() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def reading() -> None:
        other = asyncio.ensure_future(others())
        async with aclosing(server.vllm.generate(call, Meter())) as items:
            async for _ in items:
                turns.append(turn)
                if len(turns) == 205:
                    break
        other.cancel()

    server.run(reading())
    assert len(turns) == 205
    assert max(Counter(turns).values()) <= REPLAYED_AT_ONCE
    server.run(asyncio.sleep(0.1))
    server.assert_idle()
