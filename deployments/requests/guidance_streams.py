"""What `guidance_streams` may say over HTTP, besides what GuidanceParams checks.

Imports neither vllm nor ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params import FollowerParams
from cfg_core.params.fields import BETWEEN, RULE, SCHEDULE, STREAMS
from deployments.requests.endpoints import BODY_FIELDS, Endpoint


def refuse_text(body: Mapping[str, Any]) -> None:
    """Raise GuidanceError for a list or an object that is sent as JSON text.

    GuidanceParams accepts such text, for vLLM's server. But `decode_body` has not looked inside of
    a text, so nothing would bound its nesting and its numbers.
    """
    lists, objects = dict.fromkeys((STREAMS, SCHEDULE), "a JSON list"), (RULE, BETWEEN)
    for name, kind in {**lists, **dict.fromkeys(objects, "an object")}.items():
        if isinstance(body.get(name), str):
            raise GuidanceError(f"{name} is a string: send {kind}.", name)


def check_followers(followers: Iterable[FollowerParams], endpoint: Endpoint) -> None:
    """Raise GuidanceError for a stream that this endpoint, or no endpoint, can have."""
    for follower in followers:
        where = follower.where
        if follower.messages is not None and BODY_FIELDS[endpoint].messages is None:
            raise GuidanceError(
                f"{where}.messages is for conversations: send prompt or token_ids here.", where
            )
        if follower.multi_modal_data is not None:
            raise GuidanceError(
                f"{where}.multi_modal_data is for Python: over HTTP, send {where}.messages with"
                " image parts.",
                where,
            )
        if follower.prompt_embeds is not None:
            embeds = f"{where}.prompt_embeds"
            check_embeds(follower.prompt_embeds, embeds, f"{where}.messages", endpoint)
        lora = follower.lora
        if lora is not None and lora is not False and not isinstance(lora, str):
            raise GuidanceError(
                f"{where}.lora must be the name of an adapter, or false for the base model.",
                f"{where}.lora",
            )


def check_embeds(value: object, field: str, conversation: str, endpoint: Endpoint) -> None:
    """Raise GuidanceError for embeddings that are no text, or that are sent to a chat endpoint.

    conversation: the field that can have them there, as parts of messages.
    """
    if BODY_FIELDS[endpoint].messages is not None:
        raise GuidanceError(
            f"{field} is for /v1/completions: send {conversation} with parts of the type"
            " prompt_embeds here.",
            field,
        )
    if not isinstance(value, str):
        raise GuidanceError(
            f"{field} must be a string: the base64 of what torch.save wrote of a tensor.", field
        )


def check_number(streams: int, most_followers: int) -> None:
    """Raise GuidanceError for more followers than the engine takes.

    The engine's admission refuses them, too. But before that, each follower has a copy of the
    conversation, in the ingress and in the replica.

    streams: of one group, with the conditional one.
    """
    if streams > 1 + most_followers:
        raise GuidanceError(
            f"The group has {streams} streams, and this server takes {1 + most_followers} with the"
            " conditional one: send fewer.",
            STREAMS,
        )


def adapter_of(
    name: str | bool | None,
    where: str,
    adapters: Mapping[str, Any],
    is_base_model: Callable[[str], bool],
) -> list[Any] | bool | None:
    """A stream's `lora` as the engine reads it: an adapter as the list of its fields.

    False is the base model, and None is the request's own adapter. Raises GuidanceError for a name
    that is not served.

    where: the stream, for the error. adapters: vLLM's LoRARequest of each served adapter, by name.
    """
    if not isinstance(name, str):
        return name
    if name in adapters:
        found = adapters[name]
        return [found.lora_name, found.lora_int_id, found.lora_path]
    if is_base_model(name):
        return False
    known = ", ".join(sorted(adapters)) or "none"
    raise GuidanceError(
        f"{where}.lora is not the name of an adapter. Known: {known}; false is the base model.",
        f"{where}.lora",
    )
