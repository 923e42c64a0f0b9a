"""A replica goes on with streams that another one has begun.

Both are one server here: a stream is read as far as its n-th item, dropped, and sent again with
what was told until then. What the client has got by then, and what the ingress lets through of the
second answer, must be the undisturbed stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.messages import Chunk, GenerateCall
from deployments.requests.group import group_request
from deployments.requests.guidance_fields import read_guidance
from deployments.requests.progress import Told
from deployments.requests.streams import streams_of
from deployments.requests.usage import Meter
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
    "json": {
        "messages": [USER],
        "max_tokens": 30,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(MODEL, {})
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


def of_messages(texts: list[str]) -> list[Any]:
    """The events of Anthropic's API, with pieces of a text joined."""
    lines = "".join(texts).split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    pieces = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    return ["".join(pieces), [e for e in events if e["type"] != "content_block_delta"]]


def test_a_message_is_the_undisturbed_one(server: Server) -> None:
    guided = {"guidance_scale": 1.5, "negative_prompt": "Be dull."}
    call = call_of({"model": "stories", "messages": [USER], **guided}, "messages")
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
