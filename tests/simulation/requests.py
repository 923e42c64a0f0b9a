"""A simulated request: its fields, as clients word them, and what must hold for its tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from cfg_core.params import GuidanceParams, ResolvedFollower, ResolvedGuidance, TokenIds
from cfg_core.params.begun import BEGUN
from tests.simulation.texts import Rules, between_markers, model_token, random_gates

WITHOUT_END = 1_000_000


def admitted(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """The extra arguments of a request as admission leaves them; all prompts must be token ids."""
    params = GuidanceParams.from_fields(fields)
    if params is None or not params.enabled:
        return None
    if params.negative_suffix_token_ids is not None:
        suffix = TokenIds.of(params.negative_suffix_token_ids)
        return ResolvedGuidance.of(params, (), suffix=suffix).to_extra_args()
    prompts = [params.negative_prompt_token_ids]
    if params.streams is not None:
        prompts = [stream.token_ids for stream in params.streams]
    followers = tuple(ResolvedFollower(token_ids=TokenIds.of(ids or ())) for ids in prompts)
    return ResolvedGuidance.of(params, followers).to_extra_args()


def begun_with(tokens: list[int], extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """The extra arguments of a request that has output already, as admission leaves them."""
    return {**(extra or {}), BEGUN: [tokens]} if tokens else extra


@dataclass(frozen=True)
class SimRequest:
    """What is asked of a simulation.

    streams: weight and prompt of each follower, instead of scale and negative.
    schedule: (first token, scale), instead of the scale.
    window: the first guided token, and the first behind it.
    score: tokens at the end of `prompt` that are scored. The followers' prompts have them, too.
    between: a start token, an end token, and whether the negative begins anew.
    begun: how many of its tokens it has already.
    suffix: instead of a negative.
    gate: how many percent of the tokens have an open gate; None without gates.
    """

    rid: str
    prompt: list[int]
    max_tokens: int
    scale: float | None = None
    negative: list[int] | None = None
    priority: int = 0
    stop: Collection[int] = ()
    grammar: bool = False
    streams: Sequence[tuple[float, list[int]]] = ()
    schedule: Sequence[tuple[int, float]] = ()
    window: tuple[int, int | None] = (0, None)
    score: int = 0
    between: tuple[int, int, bool] | None = None
    begun: int = 0
    suffix: Sequence[int] = ()
    gate: int | None = None

    def _scored(self, ids: list[int]) -> list[int]:
        """A follower's prompt: these tokens, and those that are scored."""
        return [*ids, *self.prompt[len(self.prompt) - self.score :]]

    @property
    def _negative(self) -> list[int]:
        own = self.prompt[: len(self.prompt) - self.score]
        return self._scored(self.negative or own[-1:])

    def fields(self) -> dict[str, Any] | None:
        """Its fields of guidance; None if it has none."""
        if self.streams:
            streams = [{"weight": w, "token_ids": self._scored(ids)} for w, ids in self.streams]
            found: dict[str, Any] = {"guidance_streams": streams}
        elif self.scale is not None:
            found = self._fields_of_pair(self.scale)
        else:
            return None
        if self.window != (0, None):
            found |= {"guidance_start": self.window[0], "guidance_end": self.window[1]}
        if self.between is not None:
            names = ("start_token_id", "end_token_id", "restart_negative")
            found["guidance_between"] = dict(zip(names, self.between, strict=True))
        if self.score:
            found["guidance_score_tokens"] = self.score
        return found

    def _fields_of_pair(self, scale: float) -> dict[str, Any]:
        found: dict[str, Any] = {"negative_prompt_token_ids": self._negative}
        if self.suffix:
            found = {"negative_suffix_token_ids": list(self.suffix)}
        if self.gate is not None:
            found["guidance_min_entropy"] = 1.0
        if self.schedule:
            return found | {"guidance_schedule": list(self.schedule)}
        return found | {"guidance_scale": scale}

    def rules(self) -> Rules | None:
        """What must hold for its tokens; None if it is plain."""
        if not self.streams and self.scale in (None, 1):
            return None
        prompts = [self._scored(ids) for _, ids in self.streams]
        if not self.streams and not self.suffix:
            prompts = [self._negative]
        opens = since = None
        if self.between is not None:
            opens, since = between_markers(self.rid, self.prompt, *self.between)
        start, end = self.window
        return Rules(
            tuple(map(len, prompts)),
            tuple(weight for weight, _ in self.streams),
            tuple(self.schedule) or ((0, self.scale or 0.0),),
            start,
            WITHOUT_END if end is None else end,
            self.score,
            opens=opens,
            since=since,
            suffix=tuple(self.suffix),
            gates=None if self.gate is None else random_gates(self.rid, self.gate),
        )

    def request(self, arrival_time: float, hasher: Any) -> Request:
        """The request as vLLM's scheduler gets it; one with a grammar waits for that."""
        begun = [model_token(self.rid, i) for i in range(self.begun)]
        params = SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=True,
            extra_args=begun_with(begun, admitted(self.fields())),
            stop_token_ids=list(self.stop),
            prompt_logprobs=0 if self.score else None,
        )
        made = Request(
            request_id=self.rid,
            prompt_token_ids=self.prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival_time,
            priority=self.priority,
            block_hasher=hasher,
        )
        if self.grammar:
            made.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            made.structured_output_request = SimpleNamespace(
                grammar=None, _grammar=None, reasoning_ended=None
            )
        return made
