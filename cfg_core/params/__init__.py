"""What a request says about guidance: the fields' names, their checks, and `GuidanceParams`."""

from cfg_core.params.checks import check_negative_text, check_scale, check_token_ids
from cfg_core.params.fields import (
    AMBIGUOUS,
    END,
    FIELDS,
    FILTER_TOP_K,
    MIN_P,
    NEGATIVE_EMBEDS,
    NEGATIVE_IDS,
    NEGATIVE_MEDIA,
    NEGATIVE_TEXT,
    OFFLINE_FIELDS,
    SCALE,
    SCHEDULE,
    SCORE_TOKENS,
    START,
    STREAM_LOGPROBS,
    STREAMS,
    SYNONYMS,
    TOP_K,
    looks_like_guidance,
    unknown_field,
)
from cfg_core.params.follower import FollowerParams
from cfg_core.params.guidance import GuidanceParams
from cfg_core.params.resolved import (
    RESOLVED,
    ResolvedFollower,
    ResolvedGuidance,
    is_unresolved,
)
from cfg_core.params.token_ids import TokenIds

__all__ = [
    "AMBIGUOUS",
    "END",
    "FIELDS",
    "FILTER_TOP_K",
    "MIN_P",
    "NEGATIVE_EMBEDS",
    "NEGATIVE_IDS",
    "NEGATIVE_MEDIA",
    "NEGATIVE_TEXT",
    "OFFLINE_FIELDS",
    "RESOLVED",
    "SCALE",
    "SCHEDULE",
    "SCORE_TOKENS",
    "START",
    "STREAMS",
    "STREAM_LOGPROBS",
    "SYNONYMS",
    "TOP_K",
    "FollowerParams",
    "GuidanceParams",
    "ResolvedFollower",
    "ResolvedGuidance",
    "TokenIds",
    "check_negative_text",
    "check_scale",
    "check_token_ids",
    "is_unresolved",
    "looks_like_guidance",
    "unknown_field",
]
