"""Make a request body whose prompt is the negative stream, so that vLLM can render it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfg_core.errors import RequestError
from cfg_core.params import NEGATIVE_TEXT
from deployments.requests.body import json_type
from deployments.requests.guidance import Guidance

SYSTEM_ROLES = ("system", "developer")


# --- the negative stream as a request -------------------------------------------------------------


def negative_body(body: Mapping[str, Any], guidance: Guidance) -> dict[str, Any]:
    """The body of a request to the same endpoint whose prompt is the negative stream.

    Everything but the prompt or the messages stays, so that vLLM renders the negative exactly as it
    renders the conditional prompt (template options, tools, special tokens). But
    `kv_transfer_params` is left out, because it can hold token ids of the conditional prompt.

    guidance: its negative must be text or messages, not token ids.
    """
    body = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if guidance.negative_messages is not None:
        return {**body, "messages": guidance.negative_messages}
    text = guidance.params.negative_prompt
    assert text is not None, "token ids need no rendering"
    if "messages" in body:
        return {**body, "messages": negative_conversation(body["messages"], text)}
    return {**body, "prompt": text}


def negative_conversation(messages: object, negative_prompt: str) -> list[Any]:
    """`messages` with `negative_prompt` as the system message.

    It replaces the first system (or developer) message, and keeps that one's role. If there is
    none, a system message is put in front. An empty `negative_prompt` removes the message instead.
    Raises RequestError if `messages` is no list.
    """
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, not {json_type(messages)}.", "messages")
    at = _system_message(messages)
    if at is None:
        ours = [{"role": "system", "content": negative_prompt}] if negative_prompt else []
        return [*ours, *messages]
    ours = [{"role": messages[at]["role"], "content": negative_prompt}] if negative_prompt else []
    return [*messages[:at], *ours, *messages[at + 1 :]]


def empty_negative_note(messages: object, guidance: Guidance) -> str | None:
    """What the client of a chat should know, if its empty negative changes nothing."""
    if guidance.params.negative_prompt != "" or not isinstance(messages, list):
        return None
    if _system_message(messages) is not None:
        return None
    return (
        f"{NEGATIVE_TEXT} is empty and the conversation has no system message, so both streams"
        " were the same and guidance had no effect."
    )


def _system_message(messages: list[Any]) -> int | None:
    """The index of the first system (or developer) message; None if there is none."""
    roles = (message.get("role") if isinstance(message, dict) else None for message in messages)
    return next((i for i, role in enumerate(roles) if role in SYSTEM_ROLES), None)
