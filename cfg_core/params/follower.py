"""FollowerParams: one entry of `guidance_streams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params.checks import (
    A_NUMBER,
    A_TEXT,
    EMBEDS,
    MEDIA,
    MESSAGES,
    check_token_ids,
    from_json,
    is_list,
)
from cfg_core.params.field_table import (
    FLAG,
    IDS,
    TEXT,
    Field,
    FieldTable,
    Kind,
)
from cfg_core.params.words import kind_of

USUAL_MAX_FOLLOWERS = 8
"""Followers that one request may have, unless the engine's `max_followers` says otherwise."""

_TOKENS = partial(check_token_ids, if_empty="leave it out to begin with the conditional prompt")
_ADAPTER = Kind(lambda value, name: value, {"oneOf": [TEXT, FLAG]})
"""Who knows the adapters checks it."""

ROWS = (
    Field("weight", A_NUMBER, "The factor of the stream's log-probabilities. Any finite number."),
    Field("prompt", A_TEXT, "The stream's text, or in a conversation its system message."),
    Field(
        "messages",
        MESSAGES,
        "The stream's whole conversation, with its own images and audio.",
        sent="in chats over HTTP",
    ),
    Field("token_ids", Kind(_TOKENS, IDS), "The stream as token ids."),
    Field(
        "prompt_embeds",
        EMBEDS,
        "Completions: the stream as embeddings, in base64 as vLLM's prompt_embeds.",
    ),
    Field(
        "multi_modal_data",
        MEDIA,
        "The stream's images, audio and video, as in vLLM's prompts.",
        sent="in Python",
    ),
    Field("lora", _ADAPTER, "The name of an adapter; false is the base model."),
)
KEYS = tuple(row.name for row in ROWS)
PROMPTS = ("prompt", "messages", "token_ids", "prompt_embeds")


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
    where: str = field(default="guidance_streams", compare=False, repr=False)
    """The field that errors name."""

    def __post_init__(self) -> None:
        at = self.where
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise GuidanceError(f"{at} has {' and '.join(given)}: send only one of them.", at)
        if not given and self.lora is None and self.multi_modal_data is None:
            raise GuidanceError(
                f"{at} has neither prompt, messages, token_ids, prompt_embeds, images nor lora, so"
                " it would be the conditional stream once more: give one of them.",
                at,
            )
        _TABLE.check(self, f"{at}.")

    @classmethod
    def of(cls, entry: object, where: str) -> FollowerParams:
        """Read one entry. Raises GuidanceError for an unknown key, and for a bad value."""
        if isinstance(entry, cls):
            return entry
        if not isinstance(entry, Mapping):
            raise GuidanceError(
                f"{where} must be an object with weight and a prompt, not {kind_of(entry)}.",
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
        return _TABLE.given(self)


_TABLE = FieldTable(FollowerParams, ROWS)


def check_followers(value: object, param: str) -> tuple[FollowerParams, ...]:
    """Return the entries of `guidance_streams`, or raise GuidanceError."""
    value = from_json(value)
    if not is_list(value):
        raise GuidanceError(f"{param} must be a list of objects, not {kind_of(value)}.", param)
    if not value:
        raise GuidanceError(f"{param} is empty: leave it out for a plain request.", param)
    return tuple(FollowerParams.of(entry, f"{param}[{i}]") for i, entry in enumerate(value))


FOLLOWERS = Kind(
    check_followers,
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": _TABLE.schemas(),
            "required": ["weight"],
        },
    },
)
