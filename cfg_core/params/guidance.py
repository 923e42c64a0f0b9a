"""GuidanceParams: what a request says about guidance, checked once and then immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params.checks import (
    check_count,
    check_embeds,
    check_flag,
    check_media,
    check_negative_text,
    check_scale,
    check_schedule,
    check_share,
    check_token_ids,
)
from cfg_core.params.fields import (
    END,
    FILTER_TOP_K,
    MIN_P,
    NEGATIVE_EMBEDS,
    NEGATIVE_IDS,
    NEGATIVE_MEDIA,
    NEGATIVE_TEXT,
    SCALE,
    SCHEDULE,
    SCORE_TOKENS,
    START,
    STREAM_LOGPROBS,
    STREAMS,
    TOP_K,
    given_fields,
)
from cfg_core.params.follower import FollowerParams, check_followers
from cfg_core.params.token_ids import TokenIds

_BY_FIELD = {
    SCALE: "scale",
    NEGATIVE_TEXT: "negative_prompt",
    NEGATIVE_IDS: "negative_prompt_token_ids",
    NEGATIVE_MEDIA: "negative_media",
    NEGATIVE_EMBEDS: "negative_embeds",
    STREAMS: "streams",
    SCHEDULE: "schedule",
    START: "start",
    END: "end",
    TOP_K: "top_k",
    MIN_P: "min_p",
    FILTER_TOP_K: "filter_top_k",
    STREAM_LOGPROBS: "logprobs",
    SCORE_TOKENS: "score_tokens",
}
"""The attribute that each field sets."""

_NEED_GUIDANCE = (START, END, TOP_K, MIN_P, FILTER_TOP_K, STREAM_LOGPROBS)
"""Fields that mean nothing without followers."""


@dataclass(frozen=True, kw_only=True)
class GuidanceParams:
    """Guidance of one request.

        guided = negative + scale * (conditional - negative)      classifier-free guidance
        guided = sum_i weight_i * log p_i                         with `streams`

    The blend is taken on log-softmax (arXiv 2306.17806). The convention is that of `guidance_scale`
    in Hugging Face transformers: 1 is off.

    scale: any finite real number, 0 and negative values included.
    negative_prompt, negative_prompt_token_ids: the negative, as text or as token ids. At most one
        of them may be given. With none, the negative stream starts at the prompt's last token. An
        empty text stands for the tokens that the tokenizer makes of it, such as one that begins a
        text; if it makes none, it is as if no negative were given. At scale 1 a negative has no
        effect.
    negative_media: the images, audio and video of the negative, as `multi_modal_data` of
        FollowerParams. Without a text of its own, the negative is the prompt with these in the
        places of its own.
    negative_embeds: the negative as embeddings, as `prompt_embeds` of FollowerParams.
    streams: instead of a scale and a negative, any number of followers with weights. The leader's
        weight is 1 minus their sum.
    schedule: instead of the scale, (first output token, scale) in ascending order from 0. Each
        scale holds from its token on.
    start, end: guide only the output tokens from `start` to before `end`, counted from 0. The
        others are sampled as without guidance. None for `end`: to the end of the text.
    top_k, min_p: only the leader's k most likely tokens, or those with at least this share of its
        most likely one's probability, may be sampled (arXiv 2311.16922).
    filter_top_k: the reverse: the leader's own distribution is sampled, among the k tokens that the
        blend finds most likely.
    logprobs: whether to return, with the log-probability of each token, also those that each stream
        gave it, how far the blend is from the leader, and each stream's own most likely tokens.
    score_tokens: the last so many tokens of the prompt belong to all streams, and their
        log-probabilities are those of the blend. With a negative of its own, or a follower's own
        prompt, that prompt is what comes before these tokens. None: no token is scored.

    The constructor raises GuidanceError if a value cannot be used.
    """

    scale: float = 1.0
    negative_prompt: str | None = None
    negative_prompt_token_ids: Sequence[int] | None = None
    negative_media: Any = None
    negative_embeds: Any = field(default=None, compare=False, repr=False)
    streams: tuple[FollowerParams, ...] | None = None
    schedule: tuple[tuple[int, float], ...] | None = None
    start: int = 0
    end: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    filter_top_k: int | None = None
    logprobs: bool = False
    score_tokens: int | None = None

    def __post_init__(self) -> None:
        self._set("scale", check_scale(self.scale))
        own = (NEGATIVE_TEXT, NEGATIVE_IDS, NEGATIVE_EMBEDS)
        given = [name for name in own if getattr(self, _BY_FIELD[name]) is not None]
        if len(given) > 1:
            raise GuidanceError(
                f"{given[0]} and {given[1]} are both given: send only one of them.", given[1]
            )
        if self.negative_prompt is not None:
            check_negative_text(self.negative_prompt)
        if self.negative_prompt_token_ids is not None:
            ids = check_token_ids(self.negative_prompt_token_ids)
            self._set("negative_prompt_token_ids", ids)
        if self.negative_media is not None:
            check_media(self.negative_media, NEGATIVE_MEDIA)
        if self.negative_embeds is not None:
            check_embeds(self.negative_embeds, NEGATIVE_EMBEDS)
        if self.streams is not None:
            self._set("streams", check_followers(self.streams))
        if self.schedule is not None:
            self._set("schedule", check_schedule(self.schedule))
        self._check_window()
        for name, value in ((TOP_K, self.top_k), (FILTER_TOP_K, self.filter_top_k)):
            if value is not None:
                check_count(value, name, 1)
        if self.min_p is not None:
            self._set("min_p", check_share(self.min_p))
        check_flag(self.logprobs, STREAM_LOGPROBS)
        if self.score_tokens is not None:
            check_count(self.score_tokens, SCORE_TOKENS, 1)
            self._refuse_changes()
        self._refuse_two_formulas()
        self._refuse_what_needs_guidance()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_window(self) -> None:
        check_count(self.start, START, 0)
        if self.end is not None and check_count(self.end, END, 1) <= self.start:
            raise GuidanceError(
                f"{END} is {self.end} and {START} is {self.start}, so no token would be guided:"
                f" set {END} above {START}, or leave the guidance fields out.",
                END,
            )

    def _refuse_two_formulas(self) -> None:
        """Raise GuidanceError if two fields say what the weights are."""
        if self.streams is not None and (self.has_negative or self.schedule or self.scale != 1):
            raise GuidanceError(
                f"{STREAMS} has the weights and prompts of all negatives: leave out {SCALE},"
                f" {SCHEDULE} and the negative prompt.",
                STREAMS,
            )
        if self.schedule is not None and self.scale != 1:
            raise GuidanceError(
                f"{SCHEDULE} has the scales of all tokens: leave out {SCALE}.", SCHEDULE
            )

    def _refuse_changes(self) -> None:
        """Raise GuidanceError if the weights change along the text that is to be scored."""
        for name, value in ((SCHEDULE, self.schedule), (START, self.start), (END, self.end)):
            if value:
                raise GuidanceError(
                    f"{SCORE_TOKENS} scores all tokens with the same weights: leave out {name}.",
                    SCORE_TOKENS,
                )

    def _refuse_what_needs_guidance(self) -> None:
        if self.enabled:
            return
        defaults = type(self).__dataclass_fields__
        for name in _NEED_GUIDANCE:
            if getattr(self, _BY_FIELD[name]) != defaults[_BY_FIELD[name]].default:
                raise GuidanceError(
                    f"{SCALE} is 1 (off), so there is one stream only: leave {name} out, or"
                    f" set {SCALE}.",
                    name,
                )

    @property
    def enabled(self) -> bool:
        """Whether guidance is on.

        At scale 1 the guided distribution is the conditional one, so no follower is made.
        """
        if self.schedule is not None:
            return any(scale != 1.0 for _, scale in self.schedule)
        return self.streams is not None or self.scale != 1.0

    @property
    def has_negative(self) -> bool:
        """Whether the request has its own negative, so that the prompt's last token is not used."""
        own = (NEGATIVE_TEXT, NEGATIVE_IDS, NEGATIVE_MEDIA, NEGATIVE_EMBEDS)
        return any(getattr(self, _BY_FIELD[name]) is not None for name in own)

    @property
    def weights(self) -> tuple[float, ...]:
        """One weight for each stream, the leader's first; they sum to 1.

        With a schedule they are those of the first token.
        """
        if self.streams is not None:
            followers = [follower.weight for follower in self.streams]
            return (1.0 - sum(followers), *followers)
        scale = self.schedule[0][1] if self.schedule else self.scale
        return (scale, 1.0 - scale)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any] | None) -> GuidanceParams | None:
        """Read the guidance fields of a request body or of `SamplingParams.extra_args`.

        Returns None if the request says nothing about guidance. Fields that do not look like
        guidance are ignored. Synonyms are accepted. None as a value means "not given". Raises
        GuidanceError for an unknown field that looks like guidance, and for a value that cannot be
        used.
        """
        given = given_fields(fields or {})
        if not given:
            return None
        return cls(**{_BY_FIELD[field]: value for field, value in given.items()})

    def to_extra_args(self) -> dict[str, Any]:
        """Return these values as entries of `SamplingParams.extra_args`.

        This is the inverse of `from_fields`.
        """
        out: dict[str, Any] = {}
        defaults = type(self).__dataclass_fields__
        for request_field, name in _BY_FIELD.items():
            value = getattr(self, name)
            if value is not None and value != defaults[name].default:
                out[request_field] = value.tolist() if isinstance(value, TokenIds) else value
        if self.streams is not None:
            out[STREAMS] = [follower.to_entry() for follower in self.streams]
        elif self.schedule is not None:
            out[SCHEDULE] = [list(entry) for entry in self.schedule]
        else:
            out[SCALE] = self.scale
        return out
