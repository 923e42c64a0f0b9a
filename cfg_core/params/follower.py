"""FollowerParams: one entry of `guidance_streams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params.checks import (
    check_embeds,
    check_media,
    check_negative_text,
    check_scale,
    check_token_ids,
    from_json,
)
from cfg_core.params.fields import STREAMS

KEYS = ("prompt", "messages", "token_ids", "prompt_embeds", "multi_modal_data", "weight", "lora")
PROMPTS = KEYS[:4]


@dataclass(frozen=True, kw_only=True)
class FollowerParams:
    """A follower: what it begins with, and the weight of its log-probabilities.

    weight: any finite real number. The leader's weight is 1 minus the sum of all followers'.
    prompt, token_ids, messages: what the stream begins with, at most one of them. Over HTTP, in a
        conversation, `prompt` is the system message of a copy of the conversation, and `messages`
        is a whole conversation. Without any, the stream begins with the leader's prompt, images,
        audio and video included.
    prompt_embeds: instead of these, the embeddings of its prompt: a tensor [tokens, hidden size].
        Over HTTP it is a text, as vLLM's `prompt_embeds`.
    multi_modal_data: the images, audio and video of its prompt, as in vLLM's prompts: an object of
        lists by modality. Without a prompt of its own, they take the places of the leader's.
        Offline only; over HTTP they are parts of `messages`.
    lora: the adapter. None is the leader's own, and False is the base model. Over HTTP it is a
        name. Offline it is vLLM's LoRARequest. Between processes it is [name, id, path].

    The constructor raises GuidanceError if a value cannot be used.
    """

    weight: float
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    messages: tuple[Any, ...] | None = None
    prompt_embeds: Any = field(default=None, compare=False, repr=False)
    multi_modal_data: Any = None
    lora: Any = None
    where: str = field(default=STREAMS, compare=False, repr=False)
    """The field that errors name."""

    def __post_init__(self) -> None:
        at = self.where
        object.__setattr__(self, "weight", check_scale(self.weight, f"{at}.weight", off=""))
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise GuidanceError(f"{at} has {' and '.join(given)}: send only one of them.", at)
        if not given and self.lora is None and self.multi_modal_data is None:
            raise GuidanceError(
                f"{at} has neither prompt, messages, token_ids, prompt_embeds, images nor lora, so"
                " it would be the conditional stream once more: give one of them.",
                at,
            )
        if self.prompt is not None:
            check_negative_text(self.prompt, f"{at}.prompt")
        if self.token_ids is not None:
            hint = "leave it out to begin with the conditional prompt"
            ids = check_token_ids(self.token_ids, param=f"{at}.token_ids", if_empty=hint)
            object.__setattr__(self, "token_ids", ids)
        if self.messages is not None:
            object.__setattr__(self, "messages", _messages(self.messages, f"{at}.messages"))
        if self.prompt_embeds is not None:
            check_embeds(self.prompt_embeds, f"{at}.prompt_embeds")
        if self.multi_modal_data is not None:
            check_media(self.multi_modal_data, f"{at}.multi_modal_data")

    @classmethod
    def of(cls, entry: object, where: str) -> FollowerParams:
        """Read one entry. Raises GuidanceError for an unknown key, and for a bad value."""
        if isinstance(entry, cls):
            return entry
        if not isinstance(entry, Mapping):
            raise GuidanceError(
                f"{where} must be an object with weight and a prompt, not {type(entry).__name__}.",
                where,
            )
        for key in entry:
            if key not in KEYS:
                raise GuidanceError(
                    f"{where} has an unknown key {str(key)[:100]!r}. Known: {', '.join(KEYS)}.",
                    where,
                )
        if entry.get("weight") is None:
            raise GuidanceError(
                f"{where} has no weight: it is the factor of this stream's log-probabilities.",
                f"{where}.weight",
            )
        return cls(**entry, where=where)

    def to_entry(self) -> dict[str, Any]:
        """Return these values as an entry of `guidance_streams`, the inverse of `of`."""
        entry: dict[str, Any] = {"weight": self.weight}
        if self.prompt is not None:
            entry["prompt"] = self.prompt
        if self.token_ids is not None:
            entry["token_ids"] = list(self.token_ids)
        if self.messages is not None:
            entry["messages"] = list(self.messages)
        if self.prompt_embeds is not None:
            entry["prompt_embeds"] = self.prompt_embeds
        if self.multi_modal_data is not None:
            entry["multi_modal_data"] = self.multi_modal_data
        if self.lora is not None:
            entry["lora"] = self.lora
        return entry


def check_followers(value: object) -> tuple[FollowerParams, ...]:
    """Return the entries of `guidance_streams`, or raise GuidanceError."""
    value = from_json(value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise GuidanceError(
            f"{STREAMS} must be a list of objects, not {type(value).__name__}.", STREAMS
        )
    if not value:
        raise GuidanceError(f"{STREAMS} is empty: leave it out for a plain request.", STREAMS)
    return tuple(FollowerParams.of(entry, f"{STREAMS}[{i}]") for i, entry in enumerate(value))


def _messages(value: object, param: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise GuidanceError(
            f"{param} must be a list of messages, not {type(value).__name__}.", param
        )
    if not value:
        raise GuidanceError(
            f"{param} is empty: leave it out to begin with the conditional conversation.", param
        )
    return tuple(value)
