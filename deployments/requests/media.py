"""Images, audio and video in the bodies of requests: what is refused before anything is fetched.

Pure. Imports neither vllm nor ray. The addresses themselves are checked where they are fetched
(deployments/generator/media.py), by the rules in `address_of` and `is_public`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from yarl import URL

from cfg_core.errors import RequestError
from deployments.requests.endpoints import Endpoint, conversation_of

MAX_MEDIA = 32
"""Maximum number of images, audio and video in one conversation.

Each may be an address, which costs the client 20 bytes and the server a download. An engine may
take fewer: `limit_mm_per_prompt`.
"""

MEDIA_TOKENS = 512
"""Estimated tokens of an image, audio or video, and of a prompt of embeddings.

LLaVA-1.5 has 576 for an image.
"""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def media_parts(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of messages that are no text. Malformed messages have none."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type", "text") not in _TEXT_PARTS:
                yield part


def check_media(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raise RequestError for images, audio and video that no request may have."""
    field = "input" if endpoint == "responses" else "messages"
    parts = list(media_parts(conversation_of(endpoint, body)))
    if len(parts) > MAX_MEDIA:
        raise RequestError(
            f"The conversation has {len(parts)} images, audio and video, and one may have"
            f" {MAX_MEDIA}: send fewer.",
            field,
        )
    for part in parts:
        inner = part.get(str(part.get("type")))
        if part.get("uuid") or (isinstance(inner, Mapping) and inner.get("uuid")):
            # vLLM would keep the item under this name, for the requests of all clients.
            raise RequestError(
                "uuid is not supported: leave it out. Equal images are known by their content.",
                field,
            )


def address_of(url: str, domains: Sequence[str]) -> Literal["data", "file", "http"]:
    """What kind of address this is. Raises RequestError if it may not be used.

    domains: if not empty, the only hosts from which anything may be fetched.
    """
    if url[:5].lower() == "data:":
        return "data"
    shown = repr(url[:80])
    try:
        parts = URL(url)
        scheme, host = parts.scheme, parts.host
    except ValueError:
        raise _refused(f"{shown} is not an address.") from None
    if scheme == "file":
        return "file"
    if scheme not in ("http", "https") or not host:
        raise _refused(f"{shown} is not supported: send a data:, http: or https: address.")
    if domains and host not in domains:
        raise _refused(f"this server does not fetch from {host[:80]!r}: send a data: address.")
    return "http"


def is_public(host: str) -> bool:
    """Whether an IP address is one of the public internet, also if it carries an IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return all(one.is_global and not one.is_multicast for one in _carried(address))


def _carried(address: Address) -> Iterator[Address]:
    yield address if (mapped := getattr(address, "ipv4_mapped", None)) is None else mapped
    if isinstance(address, ipaddress.IPv6Address):
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo
        if address in _NAT64:
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _refused(sentence: str) -> RequestError:
    return RequestError(f"An image, audio or video cannot be used: {sentence}", "messages")
