"""The guidance fields: one row for each, from which everything else about names is derived.

The same fields arrive as `SamplingParams.extra_args` offline and as JSON over HTTP. Anything that
looks like guidance but is not known is refused, because a typo must never turn guidance off
silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params.between import A_PART, MARKERS
from cfg_core.params.checks import (
    A_COUNT,
    A_DISTANCE,
    A_FLAG,
    A_PLACE,
    A_SCALE,
    A_SCHEDULE,
    A_SHARE,
    A_SUFFIX,
    A_TEXT,
    AN_ENTROPY,
    EMBEDS,
    MEDIA,
    MESSAGES,
    SUFFIX_TOKENS,
    TOKENS,
)
from cfg_core.params.field_table import Field
from cfg_core.params.follower import FOLLOWERS
from cfg_core.params.rules import A_RULE

SCALE = "guidance_scale"
NEGATIVE_TEXT = "negative_prompt"
NEGATIVE_IDS = "negative_prompt_token_ids"
NEGATIVE_MEDIA = "negative_multi_modal_data"
NEGATIVE_EMBEDS = "negative_prompt_embeds"
NEGATIVE_MESSAGES = "negative_messages"
SUFFIX_TEXT = "negative_suffix"
SUFFIX_IDS = "negative_suffix_token_ids"
STREAMS = "guidance_streams"
SCHEDULE = "guidance_schedule"
START, END = "guidance_start", "guidance_end"
RULE = "guidance_rule"
BETWEEN, PART = "guidance_between", "guidance_in"
STREAM_LOGPROBS = "guidance_logprobs"
SCORE_TOKENS = "guidance_score_tokens"
"""Names that a rule about several fields, or a sentence about another one, needs."""

ROWS = (
    Field(
        SCALE,
        A_SCALE,
        "guided = negative + scale * (conditional - negative), on log-softmax. Any finite number;"
        " 1 is off.",
    ),
    Field(
        NEGATIVE_TEXT,
        A_TEXT,
        "The negative stream: its text, or in a conversation its system message. Without any"
        " negative, it starts at the prompt's last token.",
    ),
    Field(NEGATIVE_IDS, TOKENS, "The negative stream as token ids."),
    Field(
        NEGATIVE_MEDIA,
        MEDIA,
        "The negative stream's images, audio and video, as in vLLM's prompts.",
        sent="in Python",
        held_as="negative_media",
    ),
    Field(
        NEGATIVE_EMBEDS,
        EMBEDS,
        "Completions: the negative stream as embeddings, in base64 as vLLM's prompt_embeds.",
        held_as="negative_embeds",
    ),
    Field(
        NEGATIVE_MESSAGES,
        MESSAGES,
        "The whole negative conversation, with its own images and audio.",
        sent="in chats over HTTP",
        held_as=None,
    ),
    Field(
        SUFFIX_TEXT,
        A_SUFFIX,
        "Instead of a negative: at each token, the negative is the conditional stream itself,"
        " followed by this text.",
    ),
    Field(SUFFIX_IDS, SUFFIX_TOKENS, "The suffix as token ids."),
    Field(
        STREAMS,
        FOLLOWERS,
        "Instead of a scale and a negative: followers with weights. The weight of the conditional"
        " stream is 1 minus their sum.",
    ),
    Field(
        SCHEDULE,
        A_SCHEDULE,
        "Instead of guidance_scale: [first output token, scale], ascending from token 0.",
    ),
    Field(
        RULE,
        A_RULE,
        "Instead of guidance_scale: the scale of each token is computed from its own distributions,"
        ' by a rule such as {"name": "adacad", "offset": 0}.',
    ),
    Field(START, A_PLACE, "The first output token that is guided.", needs_guidance=True),
    Field(END, A_COUNT, "The first output token that is not guided any more.", needs_guidance=True),
    Field(
        BETWEEN,
        MARKERS,
        "Guide only the tokens after a start token, up to the end token, which is guided itself:"
        ' {"start_token_id", "end_token_id", "restart_negative"}. A text stands for the one token'
        " that it is. With restart_negative, the negative begins anew at each start token.",
        needs_guidance=True,
    ),
    Field(
        PART,
        A_PART,
        "Instead of guidance_between, for models with a reasoning parser: guide only what the model"
        " thinks, or only its answer.",
        needs_guidance=True,
        held_as="part",
    ),
    Field(
        "guidance_top_k",
        A_COUNT,
        "Sample only the conditional stream's k most likely tokens.",
        needs_guidance=True,
    ),
    Field(
        "guidance_min_p",
        A_SHARE,
        "Sample only tokens with at least this share of the conditional stream's highest"
        " probability.",
        needs_guidance=True,
    ),
    Field(
        "guidance_filter_top_k",
        A_COUNT,
        "Sample the conditional distribution, among the k tokens that the blend finds most likely.",
        needs_guidance=True,
    ),
    Field(
        "guidance_max_kl",
        A_DISTANCE,
        "A trust region, in nats: a token is guided less strongly than the blend says where"
        " KL(guided, conditional) would be above this.",
        needs_guidance=True,
    ),
    Field(
        "guidance_min_entropy",
        AN_ENTROPY,
        "Guide a token only where the conditional stream's entropy is at least this, in nats.",
        needs_guidance=True,
    ),
    Field(
        STREAM_LOGPROBS,
        A_FLAG,
        "Return, with each token's log-probability, also those that each stream gave it, how far"
        " the blend is from the conditional stream, and as many of each stream's own most likely"
        " tokens as there are top logprobs. Needs logprobs.",
        needs_guidance=True,
    ),
    Field(
        SCORE_TOKENS,
        A_COUNT,
        "Of a completion, with echo and logprobs: the last so many tokens of the prompt belong to"
        " all streams, and their log-probabilities are those of the blend. Tokens before have"
        " none.",
    ),
)

_ATTRIBUTES = {row.name: row.attribute for row in ROWS if row.attribute}
FIELDS = tuple(_ATTRIBUTES)
"""What GuidanceParams has, and `SamplingParams.extra_args` may say."""

HTTP_FIELDS = tuple(row.name for row in ROWS if row.sent == "everywhere")
CHAT_FIELDS = (*HTTP_FIELDS, *(row.name for row in ROWS if row.sent == "in chats over HTTP"))
"""What the body of a completion may say, and that of a chat."""

NEED_GUIDANCE = tuple(row.name for row in ROWS if row.needs_guidance)
"""What means nothing without followers."""

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
    """Return the guidance fields that are given, by the attributes of GuidanceParams.

    None as a value means "not given". Raises GuidanceError for unknown, ambiguous and duplicate
    fields.
    """
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if not looks_like_guidance(name):
            continue
        canonical = SYNONYMS.get(name, name)
        if canonical not in _ATTRIBUTES:
            raise unknown_field(name, FIELDS)
        if value is None:
            continue
        attribute = _ATTRIBUTES[canonical]
        if attribute in out:
            names = (other for other in fields if SYNONYMS.get(other, other) == canonical)
            raise GuidanceError(
                f"{' and '.join(names)} mean the same and are both given: send only one.", name
            )
        out[attribute] = value
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
