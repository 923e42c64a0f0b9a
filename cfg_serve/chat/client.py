"""Requests of a chat, and the pieces of the answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from cfg_serve.errors import CommandError

_CONNECT_S = 10.0


def headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def first_model(url: str, key: str | None) -> str:
    """The first model of the server that generates text. Raises CommandError if there is none."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers(key), timeout=_CONNECT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(unreached(url, error)) from None
    if answer.status_code != 200:
        raise CommandError(told(answer.status_code, answer.text))
    names = [model["id"] for model in answer.json()["data"] if "endpoints" not in model]
    if not names:
        raise CommandError(f"{url} serves no model that generates text.")
    return str(names[0])


async def pieces(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any]
) -> AsyncIterator[str]:
    """The text of an answer, as it comes. Raises CommandError if the server refuses or fails."""
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise CommandError(told(answer.status_code, text))
            async for line in answer.aiter_lines():
                if text := _piece(line):
                    yield text
    except httpx.HTTPError as error:
        raise CommandError(unreached(url, error)) from None


def _piece(line: str) -> str:
    """The text in a line of the stream. Raises CommandError for an error event."""
    data = line.removeprefix("data: ")
    if not line.startswith("data: ") or data == "[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise CommandError(f"the server ended the answer: {event['error']['message']}")
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def told(status: int, text: str) -> str:
    """The sentence in an answer with an error."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    hint = " Give a key: --key, or CFG_SERVE_KEY in the environment." if status == 401 else ""
    return f"the server answers {status}: {message}{hint}"


def unreached(url: str, error: Exception) -> str:
    reason = str(error) or type(error).__name__
    return f"no answer from {url} ({reason}): start one with `cfg-serve serve`, or give --url."
