"""Images, audio and video in the bodies of requests: what is refused before anything is fetched.

Pure. Imports neither vllm nor ray. The addresses themselves are checked where they are fetched
(deployments/generator/media/connector.py), by the rules in `address_of` and `is_public`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from yarl import URL

from cfg_core.errors import RequestError
from deployments.requests.endpoints import BODY_FIELDS, Endpoint, conversation_of

MAX_MEDIA = 32
"""Maximum number of images, audio and video in one conversation.

Each may be an address, which costs the client 20 bytes and the server a download. An engine may
take fewer: `limit_mm_per_prompt`.
"""

MAX_MEDIA_OF_CHOICES = 512
"""Maximum number of images, audio and video times choices (`n`): each choice gets copies."""

MEDIA_TOKENS = 512
"""Estimated tokens of an image, audio or video, and of a prompt of embeddings.

LLaVA-1.5 has 576 for an image.
"""

MEDIA_PARTS = (
    *("image_url", "input_image", "audio_url", "input_audio", "video_url"),
    *("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    "image",  # of the Messages API
)
"""Types of parts that become images, audio, video or embeddings."""

_ADDRESSES = ("image_url", "audio_url", "video_url")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")
"""The IPv6 addresses of hosts of the public internet (RFC 4291)."""

MAX_ADDRESS_CHARS = 8192
"""Maximum length of an address that is no `data:` address. Signed addresses have 1,000 to 2,000."""

PORTS = (80, 443)
"""Ports of public hosts. Other services of a host speak no HTTP, or are not for everybody."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parts_of(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """All parts of messages, with those of tools' answers. Malformed messages have none.

    messages: a conversation, or a batch of conversations.
    """
    for chat in messages:
        for message in chat if isinstance(chat, list) else [chat]:
            for field in ("content", "output") if isinstance(message, Mapping) else ():
                for part in _objects(message.get(field)):
                    yield part
                    if part.get("type") == "tool_result":  # of the Messages API
                        yield from _objects(part.get("content"))


def media_parts(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of messages that are images, audio, video or embeddings."""
    return (part for part in parts_of(messages) if part.get("type") in MEDIA_PARTS)


def check_media(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raise RequestError for parts of messages that no request may have."""
    field = str(BODY_FIELDS[endpoint].messages)
    messages = conversation_of(endpoint, body)
    number = sum(1 for _ in media_parts(messages))
    if number > MAX_MEDIA:
        raise RequestError(
            f"The conversation has {number} images, audio and video, and one may have"
            f" {MAX_MEDIA}: send fewer.",
            field,
        )
    choices = body.get("n")
    if isinstance(choices, int) and number * choices > MAX_MEDIA_OF_CHOICES:
        raise RequestError(
            f"n is {choices}, with {number} images, audio and video, and n times their number may"
            f" be {MAX_MEDIA_OF_CHOICES}: ask for fewer choices.",
            "n",
        )
    if endpoint == "messages":
        return  # vLLM makes other parts of these, with nothing in them that is refused here
    for part in parts_of(messages):
        _check_part(part, field)


def _check_part(part: Mapping[str, Any], field: str) -> None:
    """Raise RequestError for a part that vLLM would read in another way than this module."""
    kind = part.get("type")
    if not isinstance(kind, str):
        raise RequestError(
            f"A part of {field} has no type: send a text with type 'text', and an image with type"
            " 'image_url'.",
            field,
        )
    if kind == "image_pil":
        # vLLM gives it to transformers, which would open it as a file, or fetch it from any host.
        raise RequestError("type 'image_pil' is for Python: send 'image_url' over HTTP.", field)
    inner = part.get(kind)
    names = [part.get("uuid"), inner.get("uuid") if isinstance(inner, Mapping) else None]
    if names != [None, None]:
        # vLLM would keep the item under this name, for the requests of all clients.
        raise RequestError(
            "uuid is not supported: leave it out. Equal images are known by their content.", field
        )
    url = inner.get("url") if isinstance(inner, Mapping) else None
    if kind in _ADDRESSES and not (isinstance(url, str) and url):
        raise RequestError(
            f"A part of {field} with type {kind!r} has no address: send it as"
            f' "{kind}": {{"url": ...}}.',
            field,
        )


def _objects(content: object) -> Iterator[Mapping[str, Any]]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping):
            yield part


def address_of(url: str, domains: Sequence[str]) -> Literal["data", "file", "http"]:
    """What kind of address this is. Raises RequestError if it may not be used.

    domains: if not empty, the only hosts from which anything may be fetched.
    """
    if url[:5].lower() == "data:":
        return "data"
    if len(url) > MAX_ADDRESS_CHARS:
        raise _refused(
            f"its address has {len(url)} characters, and at most {MAX_ADDRESS_CHARS} are allowed:"
            " send a data: address."
        )
    shown = repr(url[:80])
    try:
        parts = URL(url)
        scheme, host, port = parts.scheme, parts.host, parts.port
        has_user = parts.raw_user is not None or parts.raw_password is not None
    except ValueError:
        raise _refused(f"{shown} is not an address.") from None
    if has_user:
        raise _refused("its address has a user name or password: leave them out.")
    if scheme == "file":
        return "file"
    if scheme not in ("http", "https") or not host:
        raise _refused(f"{shown} is not supported: send a data:, http: or https: address.")
    if domains and host not in {domain.lower() for domain in domains}:
        raise _refused(f"this server does not fetch from {host[:80]!r}: send a data: address.")
    if not domains and port not in PORTS:
        raise _refused(
            f"this server does not fetch from port {port}: use 80 or 443, or send a data: address."
        )
    return "http"


def is_public(host: str) -> bool:
    """Whether an IP address is one of the public internet, also if it carries an IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return all(one.is_global and not one.is_multicast for one in _carried(address))


def _carried(address: Address) -> Iterator[Address]:
    """The addresses that one leads to: itself, or the IPv4 addresses in it."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address in _NAT64:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    elif address.sixtofour is not None:
        yield address.sixtofour
    else:
        yield address if address in _UNICAST else ipaddress.IPv6Address("::")
        yield from address.teredo or ()


def _refused(sentence: str) -> RequestError:
    return RequestError(f"An image, audio or video cannot be used: {sentence}", "messages")
