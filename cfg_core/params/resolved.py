"""ResolvedGuidance: guidance as admission leaves it, which nobody checks again.

Admission (cfg_core/vllm_plugin/frontend/) makes it of GuidanceParams: every follower has a prompt
of token ids or of embeddings. It travels to the engine core in one extra argument of the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params.between import Between
from cfg_core.params.cuts import Cuts
from cfg_core.params.fields import looks_like_guidance
from cfg_core.params.guidance import GuidanceParams
from cfg_core.params.strength import Strength
from cfg_core.params.timeline import Timeline
from cfg_core.params.token_ids import TokenIds

RESOLVED = "cfg_serve_guidance"
"""The extra argument. A caller cannot send it: the name looks like guidance, and is no field."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The end of a prompt whose log-probabilities are wanted, under the blend.

    tokens: the last so many tokens of the prompt. All streams have them.
    top: log-probabilities of so many of the most likely tokens come with each; -1: of all.
    """

    tokens: int
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedFollower:
    """A follower with a prompt.

    token_ids, embeds: its prompt; one of them is set (embeds: cfg_core/vllm_plugin/embeddings.py).
    lora: its adapter as [name, id, path]; None is the leader's own, and False is the base model.
    """

    token_ids: TokenIds | None = None
    embeds: Mapping[str, Any] | None = None
    lora: Any = None

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return 0 if self.embeds is None else int(self.embeds["shape"][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedGuidance:
    """The guidance of one request, with its followers.

    weights: one for each stream, the leader's first. They sum to 1. With a timeline they are those
        of the first token.
    suffix: the tokens behind which the leader is its own negative, which then has the second
        weight; there are no followers. None: the followers are the negatives.
    timeline: None if all tokens are guided, with the same weights.
    cuts: None if every token may be sampled.
    strength: None if nothing limits it.
    logprobs: whether the streams' own log-probabilities are shown.
    scored: None if no token of the prompt is scored.
    """

    weights: tuple[float, ...]
    followers: tuple[ResolvedFollower, ...]
    suffix: TokenIds | None = None
    timeline: Timeline | None = None
    cuts: Cuts | None = None
    strength: Strength | None = None
    logprobs: bool = False
    scored: Scored | None = None

    @classmethod
    def of(
        cls,
        params: GuidanceParams,
        followers: tuple[ResolvedFollower, ...],
        prompt_logprobs: int | None = None,
        suffix: TokenIds | None = None,
    ) -> ResolvedGuidance:
        """What `params` say, with these followers, which have the order of its weights.

        suffix: instead of followers.
        prompt_logprobs: how many the request asks for. Some, if tokens of the prompt are scored.
        """
        tokens = params.score_tokens
        return cls(
            weights=params.weights,
            followers=followers,
            suffix=suffix,
            timeline=params.timeline,
            cuts=params.cuts,
            strength=params.strength,
            logprobs=params.logprobs,
            scored=None if tokens is None else Scored(tokens, prompt_logprobs or 0),
        )

    def same_prompts(self, prompt: Sequence[int] | None, has_adapter: bool) -> frozenset[int]:
        """The followers, from 0, that read the leader's own prompt with the leader's adapter.

        prompt: the leader's. has_adapter: whether it has an adapter.
        """
        if prompt is None or len(prompt) not in [one.num_tokens for one in self.followers]:
            return frozenset()
        ids = TokenIds.of(prompt)
        return frozenset(
            place
            for place, one in enumerate(self.followers)
            if one.token_ids == ids
            and (one.lora is None or (one.lora is False and not has_adapter))
        )

    def to_extra_args(self) -> dict[str, Any]:
        """An entry of `SamplingParams.extra_args` that vLLM's encoder can send: the inverse of
        `from_extra_args`. A prompt of token ids is one value, however long it is."""
        followers = [
            {**_values(one), "token_ids": None if one.token_ids is None else one.token_ids.packed}
            for one in self.followers
        ]
        parts = {
            "suffix": self.suffix and self.suffix.packed,
            "timeline": self.timeline and self._plain(self.timeline),
            "cuts": self.cuts and _values(self.cuts),
            "strength": self.strength and self.strength.to_plain(),
            "scored": self.scored and _values(self.scored),
        }
        return {RESOLVED: {**_values(self), **parts, "followers": followers}}

    @staticmethod
    def _plain(timeline: Timeline) -> dict[str, Any]:
        return {**_values(timeline), "between": timeline.between and timeline.between.to_entry()}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> ResolvedGuidance | None:
        """The guidance of a request that was admitted; None if it is not guided."""
        sent = (extra_args or {}).get(RESOLVED)
        if sent is None:
            return None
        followers = (
            ResolvedFollower(**{**one, "token_ids": _unpacked(one["token_ids"])})
            for one in sent["followers"]
        )
        timeline = sent["timeline"]
        if timeline is not None:
            changes = ((first, tuple(weights)) for first, weights in timeline["changes"])
            between = timeline["between"] and Between(**timeline["between"])
            timeline = Timeline(**{**timeline, "changes": tuple(changes), "between": between})
        return cls(
            weights=tuple(sent["weights"]),
            followers=tuple(followers),
            suffix=_unpacked(sent["suffix"]),
            timeline=timeline,
            cuts=sent["cuts"] and Cuts(**sent["cuts"]),
            strength=sent["strength"] and Strength.of_plain(sent["strength"]),
            logprobs=sent["logprobs"],
            scored=sent["scored"] and Scored(**sent["scored"]),
        )


def _unpacked(ids: bytes | None) -> TokenIds | None:
    return None if ids is None else TokenIds(ids)


def _values(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def is_unresolved(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether these ask for guidance, or misspell it, and admission has not seen them."""
    names = [name for name in extra_args or () if looks_like_guidance(name) and name != RESOLVED]
    if not names or extra_args is None:
        return False
    try:
        params = GuidanceParams.from_fields({name: extra_args[name] for name in names})
    except GuidanceError:
        return True
    return params is not None and params.enabled
