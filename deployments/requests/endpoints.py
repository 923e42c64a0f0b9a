"""The endpoints that generate text, and which fields of their bodies hold what.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cfg_core.errors import RequestError
from deployments.requests.body import json_type

Endpoint = Literal["completion", "chat", "responses", "messages", "batch", "scoring"]

SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, kw_only=True)
class BodyFields:
    """Field names of one endpoint's bodies.

    messages: the conversation; None if the body has a `prompt` instead.
    system: the system message, beside the messages; None if it can only be one of them.
    max_tokens: the most output tokens; of several fields, the first that is given counts.
    logprobs: the number of logprobs per token.
    guided: whether a request may be guided.
    """

    messages: str | None = None
    system: str | None = None
    max_tokens: tuple[str, ...] = ("max_tokens",)
    logprobs: str | None = None
    guided: bool = True


_CHAT = BodyFields(
    messages="messages",
    max_tokens=("max_completion_tokens", "max_tokens"),
    logprobs="top_logprobs",
)

BODY_FIELDS: dict[Endpoint, BodyFields] = {
    "completion": BodyFields(logprobs="logprobs"),
    "chat": _CHAT,
    "responses": BodyFields(
        messages="input",
        system="instructions",
        max_tokens=("max_output_tokens",),
        logprobs="top_logprobs",
    ),
    "messages": BodyFields(messages="messages", system="system"),
    "batch": replace(_CHAT, guided=False),
    "scoring": BodyFields(max_tokens=(), guided=False),
}
"""OpenAI's completions, chat completions and Responses API, Anthropic's Messages API, and vLLM's
batches of chats and generative scoring."""


def conversation_of(endpoint: Endpoint, body: Mapping[str, Any]) -> list[Any]:
    """The messages of a conversation, with the system message among them.

    The Responses API takes a text as the user's message. Malformed messages count as none.
    """
    names = BODY_FIELDS[endpoint]
    messages = body.get(names.messages or "")
    if isinstance(messages, str) and endpoint == "responses":
        messages = [{"role": "user", "content": messages}]
    system = body.get(names.system or "")
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *messages] if isinstance(messages, list) else first


def with_conversation(
    endpoint: Endpoint, body: Mapping[str, Any], messages: list[Any]
) -> dict[str, Any]:
    """The same body with `messages` as its whole conversation."""
    names = BODY_FIELDS[endpoint]
    rest = {name: value for name, value in body.items() if name != names.system}
    return {**rest, str(names.messages): messages}


def with_system(endpoint: Endpoint, body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The same body with `text` as its system message; an empty text removes that message.

    `text` replaces the field beside the messages, if that is given. Else it replaces the first
    system (or developer) message, and keeps that one's role. If there is none either, it is put in
    front. Raises RequestError if the messages are no list.
    """
    names, body = BODY_FIELDS[endpoint], dict(body)
    field = str(names.messages)
    messages = body.get(field)
    at = system_message(messages)
    if names.system is not None and (at is None or body.get(names.system) is not None):
        body[names.system] = text or None
        return body
    if not isinstance(messages, list):
        raise RequestError(f"{field} must be a list, not {json_type(messages)}.", field)
    role = "system" if at is None else messages[at]["role"]
    ours = [{"role": role, "content": text}] if text else []
    before, after = ([], messages) if at is None else (messages[:at], messages[at + 1 :])
    body[field] = [*before, *ours, *after]
    return body


def follower_body(
    endpoint: Endpoint, body: Mapping[str, Any], text: str | None, messages: Sequence[Any] | None
) -> dict[str, Any]:
    """The body of a request to the same endpoint whose prompt is a follower's.

    Everything but the prompt or the messages stays, so that vLLM renders the negative exactly as it
    renders the conditional prompt (template options, tools, special tokens). But
    `kv_transfer_params` and `prompt_embeds` are left out, because they hold the conditional prompt.
    Raises RequestError if the body's messages are no list.

    text, messages: the follower's text, or its whole conversation; one of them.
    """
    body = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if messages is not None:
        return with_conversation(endpoint, body, list(messages))
    assert text is not None, "token ids need no rendering"
    if endpoint == "completion":
        body.pop("prompt_embeds", None)
        return {**body, "prompt": text}
    return with_system(endpoint, body, text)


def has_system(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether a conversation has a system message."""
    names = BODY_FIELDS[endpoint]
    beside = names.system is not None and body.get(names.system) is not None
    return beside or system_message(body.get(names.messages or "")) is not None


def system_message(messages: object) -> int | None:
    """The index of the first system (or developer) message of a list; None if there is none."""
    if not isinstance(messages, list):
        return None
    roles = (message.get("role") if isinstance(message, dict) else None for message in messages)
    return next((i for i, role in enumerate(roles) if role in SYSTEM_ROLES), None)
