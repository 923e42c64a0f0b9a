"""The negative stream as a request of its own, for vLLM to render."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfg_core.errors import RequestError
from deployments.requests.body import json_type
from deployments.requests.guidance import Guidance

SYSTEM_ROLES = ("system", "developer")


# --- the negative stream as a request -------------------------------------------------------------


def negative_body(body: Mapping[str, Any], guidance: Guidance) -> dict[str, Any]:
    """The body of the request whose prompt is the negative stream, for the same endpoint.

    Everything but the prompt or the messages stays, so that vLLM renders the negative exactly as it
    would render a positive one (template options, tools, special tokens). Only for a negative given
    as text or as messages. Token ids that another server rendered (`kv_transfer_params`) are the
    prompt's.
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
    """`messages` with `negative_prompt` as its system message, put in front if there is none.

    Only the first system (or developer) message is replaced; it keeps its role.
    """
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, not {json_type(messages)}.", "messages")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    at = next((i for i, role in enumerate(roles) if role in SYSTEM_ROLES), None)
    if at is None:
        return [{"role": "system", "content": negative_prompt}, *messages]
    return [*messages[:at], {"role": roles[at], "content": negative_prompt}, *messages[at + 1 :]]
