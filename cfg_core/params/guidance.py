"""GuidanceParams: what a request says about guidance, checked once and then immutable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cfg_core.errors import GuidanceError
from cfg_core.params.between import Between
from cfg_core.params.cuts import Cuts
from cfg_core.params.field_table import FieldTable
from cfg_core.params.fields import (
    BETWEEN,
    END,
    NEED_GUIDANCE,
    NEGATIVE_EMBEDS,
    NEGATIVE_IDS,
    NEGATIVE_MEDIA,
    NEGATIVE_TEXT,
    PART,
    ROWS,
    RULE,
    SCALE,
    SCHEDULE,
    SCORE_TOKENS,
    START,
    STREAMS,
    SUFFIX_IDS,
    SUFFIX_TEXT,
    given_fields,
)
from cfg_core.params.follower import FollowerParams
from cfg_core.params.strength import Strength
from cfg_core.params.timeline import Timeline

Part = TypeVar("Part", Cuts, Strength)


@dataclass(frozen=True, kw_only=True)
class GuidanceParams(Cuts, Strength):
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
    negative_suffix, negative_suffix_token_ids: instead of a negative, the tokens behind which the
        conditional stream is its own negative, as text or as token ids.
    streams: instead of a scale and a negative, any number of followers with weights. The leader's
        weight is 1 minus their sum.
    schedule: instead of the scale, (first output token, scale) in ascending order from 0. Each
        scale holds from its token on.
    start, end: guide only the output tokens from `start` to before `end`, counted from 0. The
        others are sampled as without guidance. None for `end`: to the end of the text.
    between: guide only the tokens between these markers (and inside of the window).
    part: instead of markers, what the model thinks or answers. Admission knows its markers.
    Which cuts, limits and rules there are stands in Cuts and Strength, from which they are
        inherited.
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
    negative_suffix: str | None = None
    negative_suffix_token_ids: Sequence[int] | None = None
    streams: tuple[FollowerParams, ...] | None = None
    schedule: tuple[tuple[int, float], ...] | None = None
    start: int = 0
    end: int | None = None
    between: Between | None = None
    part: str | None = None
    logprobs: bool = False
    score_tokens: int | None = None

    def __post_init__(self) -> None:
        self._refuse_two_negatives()
        TABLE.check(self)
        if self.end is not None and self.end <= self.start:
            raise GuidanceError(
                f"{END} is {self.end} and {START} is {self.start}, so no token would be guided:"
                f" set {END} above {START}, or leave the guidance fields out.",
                END,
            )
        if self.between is not None and self.part is not None:
            raise GuidanceError(f"{BETWEEN} and {PART} are both given: send only one.", PART)
        if self.score_tokens is not None:
            self._refuse_changes()
        if self.has_suffix:
            self._refuse_what_has_no_suffix()
        self._refuse_two_formulas()
        self._refuse_what_a_rule_replaces()
        self._refuse_what_needs_guidance()

    def _refuse_two_negatives(self) -> None:
        own = {
            NEGATIVE_TEXT: self.negative_prompt,
            NEGATIVE_IDS: self.negative_prompt_token_ids,
            NEGATIVE_EMBEDS: self.negative_embeds,
            SUFFIX_TEXT: self.negative_suffix,
            SUFFIX_IDS: self.negative_suffix_token_ids,
        }
        given = [name for name, value in own.items() if value is not None]
        if len(given) > 1:
            raise GuidanceError(
                f"{given[0]} and {given[1]} are both given: send only one of them.", given[1]
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

    def _refuse_what_a_rule_replaces(self) -> None:
        """Raise GuidanceError for a field that says what the rule computes."""
        if self.rule is None:
            return
        if self.streams is not None:
            raise GuidanceError(
                f"{RULE} computes the scale of one negative, and {STREAMS} has weights: send the"
                " negative by itself, or leave the rule out.",
                RULE,
            )
        given = {SCALE: self.scale != 1, SCHEDULE: self.schedule is not None}
        name = next((name for name, is_given in given.items() if is_given), None)
        if name is not None and not self.rule.kind.reads_scale:
            raise GuidanceError(
                f"The rule {self.rule.name} computes the scale of each token: leave out {name}, or"
                f" {RULE}.",
                name,
            )

    def _refuse_changes(self) -> None:
        """Raise GuidanceError if the weights change along the text that is to be scored."""
        changing = {
            SCHEDULE: self.schedule,
            START: self.start,
            END: self.end,
            BETWEEN: self.between,
            PART: self.part,
        }
        for name, value in changing.items():
            if value:
                raise GuidanceError(
                    f"{SCORE_TOKENS} scores all tokens with the same weights: leave out {name}.",
                    SCORE_TOKENS,
                )

    def _refuse_what_has_no_suffix(self) -> None:
        """Raise GuidanceError for a field that means nothing beside a suffix."""
        if self.negative_media is not None:
            raise GuidanceError(
                f"{NEGATIVE_MEDIA} belong to a negative prompt, and a suffix follows the"
                " conditional stream with its own images: leave one of the two out.",
                NEGATIVE_MEDIA,
            )
        if self.score_tokens is not None:
            raise GuidanceError(
                f"{SCORE_TOKENS} scores tokens that all streams have, and a suffix comes behind"
                f" them: send {NEGATIVE_IDS} with the suffix in front of these tokens.",
                SCORE_TOKENS,
            )
        if self.between is not None and self.between.restart_negative:
            raise GuidanceError(
                f"{BETWEEN}.restart_negative begins a negative prompt anew, and a suffix has the"
                " whole conditional stream before it: leave one of the two out.",
                BETWEEN,
            )

    def check_scores(self, *, has_logprobs: bool) -> None:
        """Raise GuidanceError if tokens are to be scored and no log-probabilities are wanted.

        has_logprobs: whether the request asks for log-probabilities of its prompt.
        """
        if self.score_tokens is not None and not has_logprobs:
            raise GuidanceError(
                f"{SCORE_TOKENS} needs log-probabilities of the prompt to be asked for: send echo"
                " and logprobs with it, or prompt_logprobs.",
                SCORE_TOKENS,
            )

    def _refuse_what_needs_guidance(self) -> None:
        """Raise GuidanceError for a field that means nothing without followers."""
        given = () if self.enabled else TABLE.given(self)
        name = next((name for name in NEED_GUIDANCE if name in given), None)
        if name is not None:
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
        if self.rule is not None:
            return True
        if self.schedule is not None:
            return any(scale != 1.0 for _, scale in self.schedule)
        return self.streams is not None or self.scale != 1.0

    @property
    def has_negative(self) -> bool:
        """Whether the request has its own negative, so that the prompt's last token is not used."""
        own = (
            self.negative_prompt,
            self.negative_prompt_token_ids,
            self.negative_media,
            self.negative_embeds,
        )
        return self.has_suffix or any(value is not None for value in own)

    @property
    def has_suffix(self) -> bool:
        """Whether the negative is the conditional stream with a suffix."""
        return self.negative_suffix is not None or self.negative_suffix_token_ids is not None

    @property
    def num_streams(self) -> int:
        """Streams of a group, with the leader. A suffix needs none of its own."""
        return 1 if self.has_suffix else len(self.weights)

    @property
    def cuts(self) -> Cuts | None:
        """Which tokens may be sampled; None: every one."""
        return self._part(Cuts)

    @property
    def strength(self) -> Strength | None:
        """What makes the strength of a token a function of its rows; None: nothing."""
        return self._part(Strength)

    def _part(self, kind: type[Part]) -> Part | None:
        """The inherited values of one kind; None if all have their defaults."""
        part = kind(**{one.name: getattr(self, one.name) for one in dataclasses.fields(kind)})
        return None if part == kind() else part

    @property
    def timeline(self) -> Timeline | None:
        """When the weights change and end; None if they never do."""
        if self.schedule is None and self.start == 0 and self.end is None and not self.between:
            return None
        changes = [(0, self.weights)]
        if self.schedule is not None:
            changes = [(first, (scale, 1.0 - scale)) for first, scale in self.schedule]
        return Timeline(tuple(changes), self.start, self.end, self.between)

    @property
    def weights(self) -> tuple[float, ...]:
        """One weight for each stream, the leader's first; they sum to 1.

        With a schedule they are those of the first token. With a rule they are where it begins.
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
        values = given_fields(fields or {})
        return cls(**values) if values else None

    def to_extra_args(self) -> dict[str, Any]:
        """Return these values as entries of `SamplingParams.extra_args`.

        This is the inverse of `from_fields`.
        """
        out = TABLE.given(self)
        if self.streams is None and self.schedule is None and self.rule is None:
            out[SCALE] = self.scale
        return out


TABLE = FieldTable(GuidanceParams, ROWS)
