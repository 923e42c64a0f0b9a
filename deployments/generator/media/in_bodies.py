"""Images, audio, video and embeddings in the body of one request, from its reading to the engine.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cfg_core.vllm_plugin import embeddings
from deployments.generator.media.memory import one_request
from deployments.requests.endpoints import Endpoint, conversation_of
from deployments.requests.media_checks import check_media, media_parts

_NUMPY = "k05VTVBZ"
"""How the base64 of numpy's files begins. vLLM reads them, too, and they are never compressed."""


def check_body(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raise RequestError for media that no request may have, and for embeddings that would grow."""
    check_media(endpoint, body)
    for name, text in _embeds_of(endpoint, body):
        if isinstance(text, str) and not text.startswith(_NUMPY):
            embeddings.check_file(text, name)


def _embeds_of(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The embeddings of a body, each with its kind: of a prompt, or of images, audio or video."""
    given = body.get("prompt_embeds") if endpoint == "completion" else None
    for text in given if isinstance(given, list) else [given]:
        yield "prompt_embeds", text
    for part in media_parts(conversation_of(endpoint, body)):
        kind = str(part["type"])
        inner = part.get("data") if kind == "prompt_embeds" else part.get(kind)
        if kind.endswith("_embeds"):
            for text in inner.values() if isinstance(inner, Mapping) else [inner]:
                yield kind, text


@contextmanager
def reading_media(
    renderer: Any,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    is_sent: Callable[[int], bool] = lambda conversations: False,
    client: str = "",
) -> Iterator[None]:
    """While open, vLLM may read the media of this body, within the memory of one request.

    client: who sent the request. What one client has at a time is bounded, too.
    is_sent: asked at the end: whether the engine has so many conversations of the request.
    """
    messages = conversation_of(endpoint, body)
    conversations = len(messages) if endpoint == "batch" else 1
    with one_request(client), sent_again(renderer, messages, lambda: is_sent(conversations)):
        yield


_clearing: set[asyncio.Task[None]] = set()


@contextmanager
def sent_again(
    renderer: Any, messages: Sequence[Any], is_sent: Callable[[], bool]
) -> Iterator[None]:
    """Let vLLM send media again if what had them never reaches the engine.

    vLLM believes that what it has rendered is with the engine, and sends only its hash for the next
    request that has it. That request would fail if this one was refused, or if its client left.
    Everything is forgotten, because nobody knows here which items were this request's.
    """
    try:
        yield
    finally:
        if not is_sent() and any(media_parts(messages)):
            task = asyncio.ensure_future(renderer.clear_mm_cache_async())
            _clearing.add(task)
            task.add_done_callback(_clearing.discard)
