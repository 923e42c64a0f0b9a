"""One HTTP request while it runs in a replica, and its choices in the engine process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreRequest

from cfg_core.errors import CfgServeError
from cfg_core.params import ResolvedGuidance
from deployments.generator.engine.trace_spans import ChoiceSpans, TracedRequest
from deployments.generator.moving.recorder import Recorder
from deployments.generator.moving.replays import Replay
from deployments.generator.refusals.engine_errors import own_error
from deployments.requests.usage import Meter


class RunningRequest:
    """One HTTP request while it runs.

    share: streams that it may have in the engine at once.
    traced: None if its streams get no spans.
    recorder: what is told of its stream; None if nothing is.
    replay: of what another replica has done for it; None if none has.
    """

    def __init__(
        self,
        meter: Meter,
        share: int,
        traced: TracedRequest | None = None,
        recorder: Recorder | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.meter = meter
        self.share = share
        self.traced = traced
        self.recorder = recorder
        self.replay = replay
        self.streams = 0
        self.waiting: deque[Choice] = deque()
        self.prompts: set[str] = set()
        # One for each prompt: set when a choice ends, so that its last tokens are sent at once.
        self.wakes: set[asyncio.Event] = set()
        self.searches_beams = False
        self.failure: Exception | None = None  # what its outputs ended with, if they failed

    def begin(self) -> None:
        """Assign what this task, and tasks that it starts, ask of the engine to this run."""
        _running.set(self)

    async def within(self, stream: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yield a stream of vLLM's, and assign what it does at each step to this run.

        Some streams call the engine only when they are read, and each step of theirs may be read by
        another task.
        """
        while True:
            self.begin()
            try:
                chunk = await anext(stream)
            except StopAsyncIteration:
                return
            yield chunk

    def has_begun(self, prompts: int = 1) -> bool:
        """Whether so many of the request's prompts have been in the engine."""
        return len(self.prompts) >= prompts or self.searches_beams

    def own_failure(self) -> CfgServeError | None:
        """The failure as an error of cfg_core.errors; None if nothing failed."""
        return None if self.failure is None else own_error(self.failure)

    def has_room(self, streams: int) -> bool:
        """Whether a choice with this many streams may enter the engine now.

        A choice with more streams than the share still runs, alone.
        """
        return not self.streams or self.streams + streams <= self.share


@dataclass(eq=False, slots=True)
class Choice:
    """One choice: a request of the engine process, which has `streams` streams there.

    rows: tokens that are computed for one that is guided: of all streams, and of a suffix.
    negative_tokens: of its followers' own prompts, or of its suffix.
    """

    request: EngineCoreRequest
    run: RunningRequest
    guidance: ResolvedGuidance | None = field(init=False)
    streams: int = field(init=False)
    rows: int = field(init=False)
    negative_tokens: int = field(init=False)
    is_sent: bool = False
    tokens: int = 0
    spans: ChoiceSpans | None = None

    def __post_init__(self) -> None:
        params = self.request.sampling_params
        self.guidance = ResolvedGuidance.from_extra_args(params and params.extra_args)
        followers = self.guidance.followers if self.guidance is not None else ()
        suffix = len(self.guidance.suffix or ()) if self.guidance is not None else 0
        self.streams = 1 + len(followers)
        self.rows = self.streams + suffix
        self.negative_tokens = suffix + sum(one.num_tokens for one in followers)

    def same_prompts(self) -> frozenset[int]:
        """The followers that read the leader's own prompt; none if it has images or the like."""
        if self.guidance is None or self.request.mm_features:
            return frozenset()
        has_adapter = self.request.lora_request is not None
        return self.guidance.same_prompts(self.request.prompt_token_ids, has_adapter)


_running: ContextVar[RunningRequest | None] = ContextVar("cfg_serve_run", default=None)


def current_request() -> RunningRequest | None:
    """The HTTP request for which this task works."""
    return _running.get()
