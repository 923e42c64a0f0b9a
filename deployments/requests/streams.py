"""The streams of a request, each with its prompt and the prompt's estimated length.

The ingress has no tokenizer, so lengths are estimates. They are good enough to order the queue and
to compare replicas. Engines count exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import countOf
from typing import Any, TypeAlias

from cfg_core.errors import CfgServeError
from cfg_core.params import FollowerParams, TokenIds
from deployments.requests.endpoints import Endpoint, conversation_of, follower_body
from deployments.requests.guidance_fields import Guidance
from deployments.requests.media_checks import MEDIA_TOKENS, media_parts

BYTES_PER_TOKEN = 4
"""Estimated bytes of UTF-8 text per token: about 4 for English, 3 to 4 for Chinese, 3 for code."""

Prompt: TypeAlias = str | TokenIds
"""Text, or token ids."""

Groups: TypeAlias = "list[tuple[Stream, ...]]"
"""The streams of each prompt of a request (`streams_of`)."""

NO_TOKENS = TokenIds(b"")


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of a request.

    num_tokens: length of its prompt, estimated if the prompt is text.
    adapter: the LoRA adapter that the stream names. None is the request's own, and False is the
        base model.
    """

    prompt: Prompt
    num_tokens: int
    adapter: str | bool | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> Stream:
        return cls(prompt, num_tokens(prompt) if isinstance(prompt, str) else len(prompt))


def streams_of(endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance | None) -> Groups:
    """The streams of each prompt of a request: the conditional one and, if guided, the followers.

    It reads all texts and all token ids, so it is called once for each request.

    A conversation has one prompt, a completion may have a list of prompts. A negative that is not
    given starts at the prompt's last token: its stream has one token, and no prefix to share. One
    that is the conditional stream with a suffix is no stream of its own. A
    malformed prompt counts as empty, because vLLM will refuse it. Never raises.
    """
    if guidance is None or not guidance.enabled or guidance.params.has_suffix:
        return [(conditional,) for conditional in _conditionals(endpoint, body)]
    conditionals = _conditionals(endpoint, body)
    scored = guidance.params.score_tokens or 0  # they follow each prompt of a follower's own
    if guidance.params.streams is None:
        negative = _followed(_negative(endpoint, body, guidance), scored)
        return [(conditional, negative) for conditional in conditionals]
    followers = [
        (own and _followed(own, scored), entry.lora)
        for entry in guidance.params.streams
        for own in [_own(endpoint, body, entry)]
    ]
    return [
        (
            conditional,
            *(replace(own or conditional, adapter=adapter) for own, adapter in followers),
        )
        for conditional in conditionals
    ]


def _followed(stream: Stream, scored: int) -> Stream:
    """The stream with so many tokens more."""
    return replace(stream, num_tokens=stream.num_tokens + scored)


def num_prompts(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """How many prompts a request has. It reads no prompt, so it takes no time."""
    if endpoint == "completion":
        embedded = body.get("prompt_embeds")
        return len(prompts_of(body)) + (0 if embedded is None else len(_list(embedded)))
    several = {"scoring": "items", "batch": "messages"}.get(endpoint)
    return 1 if several is None else len(_list(body.get(several)))


def num_tokens(content: Any) -> int:
    """Estimated tokens of a text, of token ids, or of all text in nested lists and objects."""
    if isinstance(content, str):
        return math.ceil(len(content.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN)
    if isinstance(content, list):
        if countOf(map(type, content), int) == len(content):
            return len(content)
        return sum(1 if isinstance(item, int) else num_tokens(item) for item in content)
    if isinstance(content, Mapping):
        nested = (value for value in content.values() if isinstance(value, str | list | Mapping))
        return sum(num_tokens(value) for value in nested)
    return 0


def _conditionals(endpoint: Endpoint, body: Mapping[str, Any]) -> list[Stream]:
    if endpoint == "completion":
        return [*_embedded(body), *(Stream.of(_prompt(prompt)) for prompt in prompts_of(body))]
    if endpoint == "scoring":
        return [_scored(body.get("query"), item) for item in _list(body.get("items"))]
    if endpoint == "batch":
        chats = [{**body, "messages": chat} for chat in _list(body.get("messages"))]
        return [_shown("chat", chat) for chat in chats]
    return [_shown(endpoint, body)]


def _shown(endpoint: Endpoint, body: Mapping[str, Any]) -> Stream:
    """The prompt of a conversation. How many tokens its images have, only the engine knows."""
    stream = Stream.of(_conversation(endpoint, body))
    items = sum(1 for _ in media_parts(conversation_of(endpoint, body)))
    return replace(stream, num_tokens=stream.num_tokens + items * MEDIA_TOKENS)


def _scored(query: object, item: object) -> Stream:
    """The prompt of one item that is scored: the query and the item, as text or as token ids."""
    if isinstance(query, str) and isinstance(item, str):
        return Stream.of(query + item)
    return Stream.of(_token_ids(query) + _token_ids(item))


def _list(value: object) -> list[Any]:
    """`value` if it is a list with entries, else a list with one."""
    return value if isinstance(value, list) and value else [value]


def _negative(endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance) -> Stream:
    if (ids := guidance.params.negative_prompt_token_ids) is not None:
        return Stream.of(_token_ids(ids))
    if guidance.params.negative_embeds is not None:
        return Stream("", MEDIA_TOKENS)
    if guidance.negative_field is None:
        return Stream(NO_TOKENS, 1)
    try:
        return _conditionals(endpoint, guidance.negative_body(endpoint, body))[0]
    except CfgServeError:  # `messages` is no list
        return Stream.of("")


def _own(endpoint: Endpoint, body: Mapping[str, Any], entry: FollowerParams) -> Stream | None:
    """The prompt of an entry of `guidance_streams`; None if it begins with the leader's."""
    if entry.token_ids is not None:
        return Stream.of(_token_ids(entry.token_ids))
    if entry.prompt_embeds is not None:
        return Stream("", MEDIA_TOKENS)
    if entry.prompt is None and entry.messages is None:
        return None
    try:
        own = follower_body(endpoint, body, entry.prompt, entry.messages)
        return _conditionals(endpoint, own)[0]
    except CfgServeError:  # `messages` is no list
        return Stream.of("")


def _embedded(body: Mapping[str, Any]) -> list[Stream]:
    """The prompts that are embeddings. How many tokens they have, only the engine knows."""
    given = body.get("prompt_embeds")
    return [] if given is None else [Stream("", MEDIA_TOKENS) for _ in _list(given)]


def prompts_of(body: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completion that are text or token ids, as they were sent."""
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is not None:
        return []
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _prompt(value: object) -> Prompt:
    return value if isinstance(value, str) else _token_ids(value)


def _token_ids(ids: object) -> TokenIds:
    if isinstance(ids, TokenIds):
        return ids
    packed = TokenIds.checked(ids) if isinstance(ids, list | tuple) else None
    return NO_TOKENS if packed is None else packed


def _conversation(endpoint: Endpoint, body: Mapping[str, Any]) -> str:
    """The conversation as text: the tools first, as in chat templates, then the messages in order.

    It is not the text that the template makes, but it shares prefixes in the same cases. Two
    conversations with the same system prompt have a common prefix, and a conversation that goes on
    extends its own text.
    """
    messages = conversation_of(endpoint, body)
    try:
        tools = body.get("tools")
        return "".join([f"{tools}\n" if tools else "", *map(_message, messages)])
    except RecursionError:  # tools are nested too deeply for `str`
        return ""


def _message(message: object) -> str:
    if not isinstance(message, Mapping):
        return ""
    calls = message.get("tool_calls")
    return f"\0{message.get('role')}\0{_content(message.get('content'))}{calls or ''}"


def _content(content: object) -> str:
    """The text of a message's content: of its text parts, and a mark for each other part.

    The mark is the same for the same image, and seldom for another.
    """
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part["text"] for part in parts if isinstance(part, Mapping) and "text" in part)
    marks = map(_mark, media_parts([{"content": parts}]))
    return "".join([*map(str, texts), *marks])


def _mark(part: Mapping[str, Any]) -> str:
    """A few characters of an image, audio or video, which may have megabytes."""
    kind = part.get("type")
    inner = part.get("source", part.get(str(kind)))  # the Messages API has a source
    texts = inner.values() if isinstance(inner, Mapping) else [inner]
    ends = (f"{len(text)}{text[-32:]}" for text in texts if isinstance(text, str))
    return f"\0{kind}\0{''.join(ends)}\0"
