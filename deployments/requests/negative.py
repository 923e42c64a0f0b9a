"""Make a request body whose prompt is the negative stream, so that vLLM can render it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfg_core.errors import RequestError
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
    none, a system message is put in front. Raises RequestError if `messages` is no list.
    """
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, not {json_type(messages)}.", "messages")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    at = next((i for i, role in enumerate(roles) if role in SYSTEM_ROLES), None)
    if at is None:
        return [{"role": "system", "content": negative_prompt}, *messages]
    return [*messages[:at], {"role": roles[at], "content": negative_prompt}, *messages[at + 1 :]]
