"""The spans of the streams of one choice: the leader's and one for each follower.

They are made when the choice has ended, from times that the engine core told. The engine core runs
on the same machine, so its monotonic clock is this process's, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.tracing import SpanAttributes

from cfg_core.vllm_plugin.wire import FollowerEvent
from deployments.observability.spans import Span

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


@dataclass(slots=True)
class Times:
    """What is known of one stream; times by time.monotonic, 0: not known."""

    queued: float = 0.0
    scheduled: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def note(self, what: str, value: float) -> None:
        """Note an event of wire.FollowerEvent; of each time the first one counts."""
        if what == "preempted":
            self.preemptions += 1
        elif what in ("prompt_tokens", "cached_tokens"):
            setattr(self, what, int(value))
        elif what in ("queued", "scheduled") and not getattr(self, what):
            setattr(self, what, value)

    def attributes(self) -> dict[str, float]:
        """The attributes of its span."""
        told = {
            SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
        }
        steps = (
            (SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE, self.queued, self.scheduled),
            (SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL, self.scheduled, self.first),
            (SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE, self.first, self.last),
        )
        return told | {name: end - start for name, start, end in steps if start and end}


@dataclass(frozen=True)
class TracedRequest:
    """A request whose streams get spans.

    parent: the replica's span.
    weights: of the streams, the leader's first; () if it is not guided.
    """

    parent: Span
    weights: Sequence[float] = ()


@dataclass
class ChoiceSpans:
    """What becomes the spans of one choice.

    state: vLLM's state of the leader, which vLLM keeps up to date.
    """

    traced: TracedRequest
    state: RequestState | None
    num_followers: int
    _began: float = field(default_factory=time.monotonic)
    _guided: int = 0
    _finish: str = "abort"
    _followers: list[Times] = field(init=False)

    def __post_init__(self) -> None:
        self._followers = [Times() for _ in range(self.num_followers)]

    def note(self, events: Iterable[FollowerEvent]) -> None:
        """Note what happened to the followers."""
        for follower, what, value in events:
            self._followers[follower].note(what, value)

    def seen(self, finish: object, guided: int, at: float, is_gone: bool) -> None:
        """Note an output of the leader that vLLM has processed.

        finish: why the engine core ended it; None if it did not. vLLM's frontend finds stop strings
        itself, so a choice that is gone without a reason ended by one.
        guided: how many of the tokens that are kept came from joint steps.
        at: when the engine core made it.
        """
        if guided:
            self._guided += guided
            for times in self._followers:
                times.first, times.last = times.first or at, at
        if finish is not None or is_gone:
            self._finish = "stop" if finish is None else str(finish)

    def end(self) -> None:
        """Make the spans; none for a follower that never was, of a window that did not open."""
        leader, tokens = self._leader()
        told: dict[str, str | float] = {
            "finish_reason": self._finish,
            "guided_tokens": self._guided,
            SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: tokens,
        }
        self._make("stream: leader", {"role": "leader", **self._weight(0), **told}, leader)
        for i, times in enumerate(self._followers):
            if times == Times():
                continue
            about: dict[str, str | float] = {
                "role": "follower",
                "follower": i,
                **self._weight(1 + i),
            }
            self._make(f"stream: follower {i}", {**about, "guided_tokens": self._guided}, times)

    def _weight(self, stream: int) -> dict[str, float]:
        weights = self.traced.weights
        return {"weight": float(weights[stream])} if stream < len(weights) else {}

    def _leader(self) -> tuple[Times, int]:
        """The leader's times, and how many tokens it has generated."""
        state = self.state
        if state is None or state.stats is None:
            return Times(), 0
        stats = state.stats
        times = Times(
            stats.queued_ts,
            stats.scheduled_ts,
            stats.first_token_ts,
            stats.last_token_ts,
            state.prompt_len,
            state.num_cached_tokens,
            stats.num_preemptions,
        )
        return times, stats.num_generation_tokens

    def _make(self, name: str, about: dict[str, str | float], times: Times) -> None:
        start = times.queued or self._began
        span = self.traced.parent.child(name, {**about, **times.attributes()}, start_s=start)
        if self._finish == "error":
            span.fail("error")
        span.end(max(times.last or time.monotonic(), start))
