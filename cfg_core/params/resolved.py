"""ResolvedGuidance: guidance as admission leaves it, which nobody checks again.

Admission (cfg_core/vllm_plugin/frontend/) makes it of GuidanceParams: every follower has a prompt
of token ids or of embeddings. It travels to the engine core in one extra argument of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cfg_core.params.fields import SCALE, SCHEDULE, STREAMS
from cfg_core.params.guidance import GuidanceParams
from cfg_core.params.token_ids import TokenIds

RESOLVED = "cfg_serve_guidance"
"""The extra argument. A caller cannot send it: the name looks like guidance, and is no field."""

_PLAIN = ("schedule", "start", "end", "top_k", "min_p", "filter_top_k", "logprobs", "score_tokens")
"""What is the same in both classes."""


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
    """The guidance of one request, with its followers. For the other fields, see GuidanceParams.

    weights: one for each stream, the leader's first.
    """

    weights: tuple[float, ...]
    followers: tuple[ResolvedFollower, ...]
    schedule: tuple[tuple[int, float], ...] | None = None
    start: int = 0
    end: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    filter_top_k: int | None = None
    logprobs: bool = False
    score_tokens: int | None = None

    @classmethod
    def of(
        cls, params: GuidanceParams, followers: tuple[ResolvedFollower, ...]
    ) -> ResolvedGuidance:
        """What `params` say, with these followers, which have the order of its weights."""
        plain = {name: getattr(params, name) for name in _PLAIN}
        return cls(weights=params.weights, followers=followers, **plain)

    def to_extra_args(self) -> dict[str, Any]:
        """An entry of `SamplingParams.extra_args` that vLLM's encoder can send: the inverse of
        `from_extra_args`. A prompt of token ids is one value, however long it is."""
        fields = {name: getattr(self, name) for name in _PLAIN}
        followers = [
            {
                "token_ids": None if follower.token_ids is None else follower.token_ids.packed,
                "embeds": follower.embeds,
                "lora": follower.lora,
            }
            for follower in self.followers
        ]
        return {RESOLVED: {**fields, "weights": self.weights, "followers": followers}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> ResolvedGuidance | None:
        """The guidance of a request that was admitted; None if it is not guided."""
        sent = (extra_args or {}).get(RESOLVED)
        if sent is None:
            return None
        followers = tuple(
            ResolvedFollower(
                token_ids=None if one["token_ids"] is None else TokenIds(one["token_ids"]),
                embeds=one["embeds"],
                lora=one["lora"],
            )
            for one in sent["followers"]
        )
        schedule = sent["schedule"]
        return cls(
            **{
                **sent,
                "weights": tuple(sent["weights"]),
                "followers": followers,
                "schedule": None if schedule is None else tuple(map(tuple, schedule)),
            }
        )


def is_unresolved(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether these ask for guidance, and admission has not seen them."""
    if not extra_args:
        return False
    return (
        extra_args.get(SCALE, 1) != 1
        or extra_args.get(STREAMS) is not None
        or extra_args.get(SCHEDULE) is not None
    )
