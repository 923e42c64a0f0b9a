"""GuidanceParams: what a request says about guidance, checked once and then immutable.

The same fields arrive as `SamplingParams.extra_args` offline and as JSON over HTTP, so both are
parsed here, by `GuidanceParams.from_fields`. Anything that looks like guidance but is not known is
refused, because a typo must never turn guidance off silently.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import GuidanceError

SCALE = "guidance_scale"
NEGATIVE_TEXT = "negative_prompt"
NEGATIVE_IDS = "negative_prompt_token_ids"
STREAM_LOGPROBS = "guidance_logprobs"
FIELDS = (SCALE, NEGATIVE_TEXT, NEGATIVE_IDS, STREAM_LOGPROBS)

SYNONYMS = {"cfg_scale": SCALE, "negative_prompt_ids": NEGATIVE_IDS}
"""Accepted names that other systems use with exactly the same meaning."""

AMBIGUOUS = ("cfg_weight", "cfg_coef")
"""Names that are refused with advice, because two conventions are in use (off at 0, off at 1)."""

GUIDANCE_PREFIXES = ("guidance", "cfg", "negative")


@dataclass(frozen=True, kw_only=True)
class GuidanceParams:
    """Classifier-free guidance of one request.

        guided = negative + scale * (conditional - negative)

    The blend is taken on log-softmax (arXiv 2306.17806). The convention is that of `guidance_scale`
    in Hugging Face transformers: 1 is off.

    scale: any finite real number, 0 and negative values included.
    negative_prompt, negative_prompt_token_ids: the negative, as text or as token ids. At most one
        of them may be given. With none, the negative stream starts at the prompt's last token. An
        empty text stands for the tokens that the tokenizer makes of it, such as one that begins a
        text; if it makes none, it is as if no negative were given. At scale 1 a negative has no
        effect.
    logprobs: whether to return, with the log-probability of each token, also those that the
        conditional and the negative stream gave it.

    The constructor raises GuidanceError if a value cannot be used.
    """

    scale: float = 1.0
    negative_prompt: str | None = None
    negative_prompt_token_ids: tuple[int, ...] | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_scale(self.scale))
        if self.negative_prompt is not None and self.negative_prompt_token_ids is not None:
            raise GuidanceError(
                f"{NEGATIVE_TEXT} and {NEGATIVE_IDS} are both given: send only one of them.",
                NEGATIVE_IDS,
            )
        if self.negative_prompt is not None:
            check_negative_text(self.negative_prompt)
        if self.negative_prompt_token_ids is not None:
            ids = check_token_ids(self.negative_prompt_token_ids)
            object.__setattr__(self, "negative_prompt_token_ids", ids)
        if not isinstance(self.logprobs, bool):
            raise GuidanceError(f"{STREAM_LOGPROBS} must be true or false.", STREAM_LOGPROBS)
        if self.logprobs and not self.enabled:
            raise GuidanceError(
                f"{SCALE} is 1 (off), so there is one stream only: leave {STREAM_LOGPROBS} out, or"
                f" set {SCALE}.",
                STREAM_LOGPROBS,
            )

    @property
    def enabled(self) -> bool:
        """Whether guidance is on.

        At scale 1 the guided distribution is the conditional one, so no follower is made.
        """
        return self.scale != 1.0

    @property
    def has_negative(self) -> bool:
        """Whether the request has its own negative, so that the prompt's last token is not used."""
        return self.negative_prompt is not None or self.negative_prompt_token_ids is not None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any] | None) -> GuidanceParams | None:
        """Read the guidance fields of a request body or of `SamplingParams.extra_args`.

        Returns None if the request says nothing about guidance. Fields that do not look like
        guidance are ignored. Synonyms are accepted. None as a value means "not given". Raises
        GuidanceError for an unknown field that looks like guidance, and for a value that cannot be
        used.
        """
        given = _canonical(fields or {})
        if not given:
            return None
        ids = given.get(NEGATIVE_IDS)
        return cls(
            scale=given.get(SCALE, 1.0),
            negative_prompt=given.get(NEGATIVE_TEXT),
            negative_prompt_token_ids=None if ids is None else check_token_ids(ids),
            logprobs=given.get(STREAM_LOGPROBS, False),
        )

    def to_extra_args(self) -> dict[str, Any]:
        """Return these values as entries of `SamplingParams.extra_args`.

        This is the inverse of `from_fields`.
        """
        out: dict[str, Any] = {SCALE: self.scale}
        if self.negative_prompt is not None:
            out[NEGATIVE_TEXT] = self.negative_prompt
        if self.negative_prompt_token_ids is not None:
            out[NEGATIVE_IDS] = list(self.negative_prompt_token_ids)
        if self.logprobs:
            out[STREAM_LOGPROBS] = True
        return out


def looks_like_guidance(name: str) -> bool:
    """Return whether a user who sends a field of this name can only mean guidance.

    Such a field is refused if it is unknown.
    """
    return name.lower().startswith(GUIDANCE_PREFIXES)


def check_scale(value: object) -> float:
    """Return `value` as a finite float, or raise GuidanceError (for booleans, too)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GuidanceError(f"{SCALE} must be a number, not {type(value).__name__}.", SCALE)
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise GuidanceError(
            f"{SCALE} must be finite: send a number such as 1.5 (1 turns guidance off).", SCALE
        )
    return scale


def check_negative_text(value: object, param: str = NEGATIVE_TEXT) -> str:
    """Return `value` if it is text, or raise GuidanceError."""
    if not isinstance(value, str):
        raise GuidanceError(f"{param} must be a string, not {type(value).__name__}.", param)
    return value


def check_token_ids(
    value: object, vocab_size: int | None = None, param: str = NEGATIVE_IDS
) -> tuple[int, ...]:
    """Return `value` as a tuple of token ids, or raise GuidanceError.

    vocab_size: if given, each id must be in [0, vocab_size).
    param: the field that the error names.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise GuidanceError(
            f"{param} must be a list of token ids, not {type(value).__name__}.", param
        )
    if not value:
        raise GuidanceError(
            f"{param} is empty: leave the field out to let the negative stream start at the"
            " prompt's last token.",
            param,
        )
    limit = math.inf if vocab_size is None else vocab_size
    for i, token in enumerate(value):
        if type(token) is not int:
            raise GuidanceError(
                f"{param}[{i}] must be an integer, not {type(token).__name__}.", param
            )
        if not 0 <= token < limit:
            bound = "at least 0" if vocab_size is None else f"in [0, {vocab_size})"
            raise GuidanceError(
                f"{param}[{i}] is {token}: token ids of this model are {bound}.", param
            )
    return tuple(value)


def _canonical(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guidance fields that are given, with synonyms replaced by our names.

    Raises GuidanceError for unknown, ambiguous and duplicate fields.
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
