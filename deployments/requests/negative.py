"""Make a request body whose prompt is the negative stream, so that vLLM can render it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.requests.endpoints import (
    Endpoint,
    with_conversation,
    with_system,
)
from deployments.requests.guidance import Guidance


def negative_body(
    endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance
) -> dict[str, Any]:
    """The body of a request to the same endpoint whose prompt is the negative stream.

    Everything but the prompt or the messages stays, so that vLLM renders the negative exactly as it
    renders the conditional prompt (template options, tools, special tokens). But
    `kv_transfer_params` and `prompt_embeds` are left out, because they hold the conditional prompt.
    Raises RequestError if the body's messages are no list.

    guidance: its negative must be text or messages, not token ids.
    """
    text, messages = guidance.params.negative_prompt, guidance.negative_messages
    return follower_body(endpoint, body, text, messages)


def follower_body(
    endpoint: Endpoint, body: Mapping[str, Any], text: str | None, messages: Sequence[Any] | None
) -> dict[str, Any]:
    """As `negative_body`, for a follower with this text, or with this conversation."""
    body = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if messages is not None:
        return with_conversation(endpoint, body, list(messages))
    assert text is not None, "token ids need no rendering"
    if endpoint == "completion":
        body.pop("prompt_embeds", None)
        return {**body, "prompt": text}
    return with_system(endpoint, body, text)
