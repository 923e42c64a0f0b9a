"""The requests that our own server and Ray Serve LLM must answer alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from tools.serving.process import Json

OPENINGS = (
    "Once upon a time",
    "Long ago, a little",
    "One morning, the",
    "There was once an old",
    "In a village by the sea",
)
HEROES = ("fox", "girl", "baker", "robot", "sailor", "king", "cat", "tree", "owl", "boy")
PROMPTS = [f"{opening} {hero}" for opening in OPENINGS for hero in HEROES]
"""50 prompts."""

SEA = "A story about the sea."
GUIDANCE: list[Json] = [
    {"guidance_scale": 3.0, "negative_prompt": SEA},
    {"guidance_scale": 0.5},
    {"guidance_scale": 2.0, "negative_prompt_token_ids": [5, 6, 7, 8], "guidance_end": 12},
    {"guidance_schedule": [[0, 3.0], [8, 1.5]], "negative_prompt": "A dark night."},
    {
        "guidance_streams": [
            {"prompt": SEA, "weight": -1.0},
            {"prompt": "A story about a farm.", "weight": 0.5},
        ]
    },
]
OPTIONS: Json = {"model": "stories", "max_tokens": 24, "temperature": 0}
COMPLETIONS: list[Json] = [
    {**OPTIONS, "prompt": prompt, **GUIDANCE[place % len(GUIDANCE)]}
    for place, prompt in enumerate(PROMPTS)
]
CHATS: list[Json] = [
    {
        **OPTIONS,
        "messages": [{"role": "user", "content": f"Tell a story about a {hero}."}],
        "guidance_scale": 3.0,
        **negative,
    }
    for hero in HEROES[:5]
    for negative in (
        {"negative_prompt": "You tell stories about the sea."},
        {"negative_messages": [{"role": "user", "content": "Tell a story about the sea."}]},
    )
]
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


def in_xargs(body: Json) -> Json:
    """The same body with its guidance in `vllm_xargs`, as `vllm serve` takes it."""
    inside = {name: value for name, value in body.items() if name.startswith(("guid", "nega"))}
    rest = {name: value for name, value in body.items() if name not in inside}
    as_text = ("guidance_streams", "guidance_schedule")
    inside = {n: json.dumps(v) if n in as_text else v for n, v in inside.items()}
    return {**rest, "vllm_xargs": inside}


def post(url: str, body: Json) -> httpx.Response:
    path = next(path for field, path in PATHS.items() if field in body)
    return httpx.post(f"{url}{path}", json=body, timeout=120)


def answer(url: str, body: Json) -> tuple[str, Any]:
    """The text of an answer, and its guidance object."""
    found = post(url, body)
    assert found.status_code == 200, found.text
    return told(found.json())


def told(answer: Json) -> tuple[str, Any]:
    """The same of an answer that is not streamed."""
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, answer.get("guidance")


def streamed(url: str, body: Json) -> tuple[str, Any]:
    """The same of a stream."""
    found = post(url, {**body, "stream": True})
    assert found.status_code == 200, found.text
    assert found.text.endswith("data: [DONE]\n\n")
    text, guidance = "", None
    for event in _events(found.text):
        guidance = event.get("guidance", guidance)
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text, guidance


def _events(text: str) -> Iterator[Json]:
    for event in text.split("\n\n"):
        data = event.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)
