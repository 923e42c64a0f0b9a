"""Bodies as real clients send them: answered with 200, and guided where they ask for it.

clients.jsonl has one body a line, with the client, its mode, and where its fields were read: in the
client's public source, or on the wire from the client itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.serving.process import Json

LINES = (Path(__file__).parent / "clients.jsonl").read_text().splitlines()
RECORDED = [json.loads(line) for line in LINES]
MOST_TOKENS = {"max_tokens": 16, "max_completion_tokens": 16, "max_output_tokens": 16}


def guidance_of(answer: httpx.Response, route: str, is_stream: bool) -> Json | None:
    """The guidance object of an answer, or of the chunks of its stream; None if there is none."""
    if not is_stream:
        whole: Json | None = answer.json().get("guidance")
        return whole
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "error" not in answer.text[:100]
    if route == "/v1/responses":
        last = json.loads(events[-1])
        assert last["type"] in ("response.completed", "response.incomplete")
        reported: Json | None = last["response"].get("guidance")
        return reported
    assert events[-1] == "[DONE]"
    found = [chunk["guidance"] for e in events[:-1] if "guidance" in (chunk := json.loads(e))]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r["name"])
def test_recorded_bodies_are_served(http: httpx.Client, model: str, recorded: Json) -> None:
    body: dict[str, Any] = dict(recorded["body"])
    body |= {name: min(most, body[name]) for name, most in MOST_TOKENS.items() if body.get(name)}
    if body.get("model") is not None:
        body["model"] = model
    if body.get("logit_bias"):  # its token ids are those of another model
        body["logit_bias"] = dict(enumerate(body["logit_bias"].values(), start=5))
    answer = http.post(recorded["route"], json=body)
    assert answer.status_code == 200, answer.text
    told = guidance_of(answer, recorded["route"], bool(body.get("stream")))
    if recorded["guided"]:
        assert told is not None
        assert told["streams"] == 2
        assert told["guided_tokens"] > 0
    elif told is not None:
        assert told["streams"] == 1
        assert ("note" in told) == (body.get("negative_prompt") is not None)


def test_the_recorded_bodies_cover_the_clients() -> None:
    clients = " ".join(recorded["client"].lower() for recorded in RECORDED)
    names = "sillytavern text-generation-webui kobold open webui librechat langchain llamaindex"
    names += " llm pydantic-ai haystack dspy vercel @langchain/openai litellm instructor openai"
    for name in names.split():
        assert name in clients, name
    assert sum(recorded["guided"] for recorded in RECORDED) >= 25
