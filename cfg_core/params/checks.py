"""Checks of single values. Each returns the value in its final type, or raises GuidanceError.

Each is called with the value and with the name of the field that the error shows. The kinds of
values at the end of this module have them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

from cfg_core.errors import GuidanceError
from cfg_core.params.field_table import COUNT, FLAG, IDS, NUMBER, OBJECTS, TEXT, Kind
from cfg_core.params.token_ids import MOST, TokenIds
from cfg_core.params.words import kind_of

LATEST = 2**31
"""Token positions and counts are below this number. No context is as long."""

MOST_CHANGES = 1024
"""Entries that a schedule may have."""


def check_scale(value: object, param: str) -> float:
    """Return `value` as a finite float; booleans are none."""
    return check_number(value, param, off=" (1 turns guidance off)")


def check_number(value: object, param: str, off: str = "") -> float:
    """As `check_scale`, for another number.

    off: what the error says about the value that changes nothing.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GuidanceError(f"{param} must be a number, not {kind_of(value)}.", param)
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise GuidanceError(f"{param} must be finite: send a number such as 1.5{off}.", param)
    return scale


def check_count(value: object, param: str, least: int) -> int:
    """Return `value` if it is an integer of at least `least`."""
    if type(value) is not int:
        raise GuidanceError(f"{param} must be an integer, not {kind_of(value)}.", param)
    if not least <= value < LATEST:
        raise GuidanceError(f"{param} is {value}: it must be {least} or more.", param)
    return value


def check_share(value: object, param: str) -> float:
    """Return `value` as a float in (0, 1]."""
    share = check_number(value, param)
    if not 0 < share <= 1:
        raise GuidanceError(
            f"{param} is {share}: it is a share of the most likely token's probability, above 0"
            " and at most 1.",
            param,
        )
    return share


def check_nats(value: object, param: str, *, above_0: bool) -> float:
    """Return `value` as a float of at least 0, or above 0."""
    nats = check_number(value, param)
    if nats < 0 or (above_0 and nats == 0):
        least = "above 0" if above_0 else "0 or more"
        raise GuidanceError(f"{param} is {nats:g}: it is a number of nats, {least}.", param)
    return nats


def check_schedule(value: object, param: str) -> tuple[tuple[int, float], ...]:
    """Return `value` as (first output token, scale), ascending from 0."""
    shape = f"{param} must be a list of [from_token, scale], such as [[0, 1.5], [64, 1.2]]"
    value = from_json(value)
    if not is_list(value):
        raise GuidanceError(f"{shape}, not {kind_of(value)}.", param)
    if not 0 < len(value) <= MOST_CHANGES:
        raise GuidanceError(f"{shape}, with 1 to {MOST_CHANGES} entries.", param)
    entries: list[tuple[int, float]] = []
    for i, entry in enumerate(value):
        if not is_list(entry) or len(entry) != 2:
            raise GuidanceError(f"{param}[{i}] is no pair: {shape}.", param)
        first = check_count(entry[0], f"{param}[{i}][0]", 0)
        entries.append((first, check_scale(entry[1], f"{param}[{i}][1]")))
    firsts = [first for first, _ in entries]
    if firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts)):
        raise GuidanceError(f"{param} must begin at token 0 and ascend: {shape}.", param)
    return tuple(entries)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def from_json(value: object) -> object:
    """Return what `value` says if it is JSON text, else `value`.

    vLLM's server takes only text, numbers and lists of them as extra arguments (`vllm_xargs`), so
    its clients send lists of objects as text.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def check_text(value: object, param: str) -> str:
    """Return `value` if it is text."""
    if not isinstance(value, str):
        raise GuidanceError(f"{param} must be a string, not {kind_of(value)}.", param)
    return value


NO_SUFFIX = "leave it out for another negative"


def check_suffix(value: object, param: str) -> str:
    """Return `value` if it is a text of at least one character."""
    text = check_text(value, param)
    if not text:
        raise GuidanceError(
            f"{param} is empty, so the negative would be the conditional stream itself:"
            f" {NO_SUFFIX}.",
            param,
        )
    return text


def check_messages(value: object, param: str) -> tuple[Any, ...]:
    """Return the conversation of a follower."""
    if not is_list(value):
        raise GuidanceError(f"{param} must be a list of messages, not {kind_of(value)}.", param)
    if not value:
        raise GuidanceError(
            f"{param} is empty: leave it out to begin with the conditional conversation.", param
        )
    return tuple(value)


def check_token_ids(
    value: object,
    param: str,
    vocab_size: int | None = None,
    if_empty: str = "leave the field out to let the negative stream start at the prompt's last"
    " token",
) -> TokenIds:
    """Return `value` as TokenIds. TokenIds were checked before.

    vocab_size: if given, each id must be in [0, vocab_size).
    if_empty: what the error for an empty list says to do instead.
    """
    if not is_list(value):
        raise GuidanceError(f"{param} must be a list of token ids, not {kind_of(value)}.", param)
    if not value:
        raise GuidanceError(f"{param} is empty: {if_empty}.", param)
    ids = value if isinstance(value, TokenIds) else TokenIds.checked(value)
    if ids is None or (vocab_size is not None and max(ids) >= vocab_size):
        raise _bad_token(value, vocab_size, param)
    return ids


def _bad_token(ids: Sequence[object], vocab_size: int | None, param: str) -> GuidanceError:
    """The error for the first of the ids that cannot be used; one of them cannot."""
    limit = MOST if vocab_size is None else min(vocab_size, MOST)
    for i, token in enumerate(ids):
        if type(token) is not int:
            reason = f"must be an integer, not {kind_of(token)}"
        elif token < 0 or token >= limit:
            bound = f"in [0, {limit})" if token >= 0 or vocab_size is not None else "at least 0"
            reason = f"is {token}: token ids of this model are {bound}"
        else:
            continue
        return GuidanceError(f"{param}[{i}] {reason}.", param)
    raise AssertionError("unreachable: one of the ids cannot be used")


def check_media(value: object, param: str) -> object:
    """Return `value` if it can be images, audio or video of a prompt.

    It is an object by modality, as vLLM's `multi_modal_data`, or the name of media that are already
    with the engine's frontend (cfg_core/vllm_plugin/frontend/follower_media.py). Texts inside of it
    are refused: some processors would open them as files or addresses.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not value:
        raise GuidanceError(
            f"{param} must be an object such as {{'image': [image]}}, not {kind_of(value)}.",
            param,
        )
    for modality, items in value.items():
        for item in items if isinstance(items, list | tuple) else [items]:
            if isinstance(item, str | bytes):
                raise GuidanceError(
                    f"{param} has text for {str(modality)[:20]}: give the image, audio or video"
                    " itself, not its address or its bytes.",
                    param,
                )
    return value


def check_embeds(value: object, param: str) -> object:
    """Return `value` if it can be embeddings of a prompt.

    It is a tensor [T, hidden size], over HTTP a text (torch.save in base64, as vLLM's
    `prompt_embeds`), and between processes an object of bytes (cfg_core/vllm_plugin/embeddings.py).
    """
    if isinstance(value, str):
        if value:
            return value
        raise GuidanceError(f"{param} is empty: send a tensor in base64, or leave it out.", param)
    shape = value.get("shape") if isinstance(value, Mapping) else getattr(value, "shape", None)
    sizes = list(shape) if isinstance(shape, list | tuple) else None  # torch.Size is a tuple
    if sizes is None or len(sizes) != 2 or not all(sizes):
        raise GuidanceError(
            f"{param} must be a tensor of shape [tokens, hidden size], not"
            f" {type(value).__name__ if sizes is None else sizes}.",
            param,
        )
    return value


def check_flag(value: Any, param: str) -> bool:
    """Return `value` if it is a boolean."""
    if not isinstance(value, bool):
        raise GuidanceError(f"{param} must be true or false.", param)
    return value


# --- kinds of values ------------------------------------------------------------------------------

A_TEXT = Kind(check_text, TEXT)
A_FLAG = Kind(check_flag, FLAG)
A_NUMBER = Kind(check_number, NUMBER)
A_SCALE = Kind(check_scale, {**NUMBER, "examples": [1.5]})
A_SHARE = Kind(check_share, NUMBER)
A_DISTANCE = Kind(partial(check_nats, above_0=True), {**NUMBER, "exclusiveMinimum": 0})
AN_ENTROPY = Kind(partial(check_nats, above_0=False), {**NUMBER, "minimum": 0})
A_PLACE = Kind(partial(check_count, least=0), COUNT)
A_COUNT = Kind(partial(check_count, least=1), COUNT)
A_SCHEDULE = Kind(
    check_schedule,
    {"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}},
)
MESSAGES = Kind(check_messages, OBJECTS)
TOKENS = Kind(check_token_ids, IDS)
A_SUFFIX = Kind(check_suffix, TEXT)
SUFFIX_TOKENS = Kind(partial(check_token_ids, if_empty=NO_SUFFIX), IDS)
EMBEDS = Kind(check_embeds, TEXT)
MEDIA = Kind(check_media, {})
