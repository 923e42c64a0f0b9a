"""The names of the guidance fields, and which other names are accepted or refused.

The same fields arrive as `SamplingParams.extra_args` offline and as JSON over HTTP. Anything that
looks like guidance but is not known is refused, because a typo must never turn guidance off
silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from cfg_core.errors import GuidanceError

SCALE = "guidance_scale"
NEGATIVE_TEXT = "negative_prompt"
NEGATIVE_IDS = "negative_prompt_token_ids"
NEGATIVE_MEDIA = "negative_multi_modal_data"
NEGATIVE_EMBEDS = "negative_prompt_embeds"
STREAMS = "guidance_streams"
SCHEDULE = "guidance_schedule"
START, END = "guidance_start", "guidance_end"
TOP_K, MIN_P, FILTER_TOP_K = "guidance_top_k", "guidance_min_p", "guidance_filter_top_k"
STREAM_LOGPROBS = "guidance_logprobs"
SCORE_TOKENS = "guidance_score_tokens"
FIELDS = (
    SCALE,
    NEGATIVE_TEXT,
    NEGATIVE_IDS,
    NEGATIVE_MEDIA,
    NEGATIVE_EMBEDS,
    STREAMS,
    SCHEDULE,
    START,
    END,
    TOP_K,
    MIN_P,
    FILTER_TOP_K,
    STREAM_LOGPROBS,
    SCORE_TOKENS,
)

OFFLINE_FIELDS = (NEGATIVE_MEDIA,)
"""Fields whose values are Python objects: images, audio, video. Over HTTP they are parts of
messages."""

SYNONYMS = {"cfg_scale": SCALE, "negative_prompt_ids": NEGATIVE_IDS}
"""Accepted names that other systems use with exactly the same meaning."""

AMBIGUOUS = ("cfg_weight", "cfg_coef")
"""Names that are refused with advice, because two conventions are in use (off at 0, off at 1)."""

GUIDANCE_PREFIXES = ("guidance", "cfg", "negative")


def looks_like_guidance(name: str) -> bool:
    """Return whether a user who sends a field of this name can only mean guidance.

    Such a field is refused if it is unknown.
    """
    return name.lower().startswith(GUIDANCE_PREFIXES)


def given_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guidance fields that are given, with synonyms replaced by our names.

    None as a value means "not given". Raises GuidanceError for unknown, ambiguous and duplicate
    fields.
    """
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if not looks_like_guidance(name):
            continue
        canonical = SYNONYMS.get(name, name)
        if canonical not in FIELDS:
            raise unknown_field(name, FIELDS)
        if value is None:
            continue
        if canonical in out:
            names = (other for other in fields if SYNONYMS.get(other, other) == canonical)
            raise GuidanceError(
                f"{' and '.join(names)} mean the same and are both given: send only one.", name
            )
        out[canonical] = value
    return out


def unknown_field(name: str, known: Sequence[str]) -> GuidanceError:
    """Return the error for a field that looks like guidance but is not one of `known`."""
    if name in AMBIGUOUS:
        return GuidanceError(
            f"{name} is ambiguous, two conventions are in use. Send {SCALE} instead: "
            f"{SCALE} = 1 + {name} where 0 means off, {SCALE} = {name} where 1 means off.",
            name,
        )
    near = difflib.get_close_matches(name, [*known, *SYNONYMS], n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    shown = name[:100]
    return GuidanceError(
        f"{shown} is not a guidance field of this server.{hint} Known: {', '.join(known)}.", name
    )
