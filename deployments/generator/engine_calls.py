"""Between vLLM's frontend and its engine process: what each HTTP request has in the engine.

`EngineCalls` wraps the methods that every request passes, whatever its endpoint: a list of prompts,
`n`, a beam search. It counts tokens into the request's Meter, and lets no request have more streams
in the engine at once than its share. vLLM's own code does all the rest: it makes the choices of
`n`, and orders and joins their outputs. A choice that waits is only handed to the engine process
later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from cfg_core.errors import CfgServeError
from cfg_core.params import ResolvedGuidance
from cfg_core.vllm_plugin import versions
from cfg_core.vllm_plugin.frontend.follower_media import forget
from cfg_core.vllm_plugin.pace import Progress
from cfg_core.vllm_plugin.wire import follower_events, guided_tokens, token_strengths
from deployments.generator.engine_errors import own_error
from deployments.generator.stream_spans import ChoiceSpans, TracedRequest
from deployments.requests.usage import Meter

MEDIA_LOST = (
    "The engine does not have an image, audio or video of the request any more: send the request"
    " again."
)
"""The reason if vLLM has sent the hash of an item alone, and the engine has dropped the item.

After this, vLLM sends it whole.
"""


class RunningRequest:
    """One HTTP request while it runs.

    share: streams that it may have in the engine at once.
    traced: None if its streams get no spans.
    """

    def __init__(self, meter: Meter, share: int, traced: TracedRequest | None = None) -> None:
        self.meter = meter
        self.share = share
        self.traced = traced
        self.streams = 0
        self.waiting: deque[_Entry] = deque()
        self.prompts: set[str] = set()
        # One for each prompt: set when a choice ends, so that its last tokens are sent at once.
        self.wakes: set[asyncio.Event] = set()
        self.searches_beams = False
        self.failure: Exception | None = None  # what its outputs ended with, if they failed

    def begin(self) -> None:
        """Assign what this task, and tasks that it starts, ask of the engine to this run."""
        _run.set(self)

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
class _Entry:
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


_run: ContextVar[RunningRequest | None] = ContextVar("cfg_serve_run", default=None)


def current_request() -> RunningRequest | None:
    """The HTTP request for which this task works."""
    return _run.get()


def watch_beams(serving: Any) -> None:
    """Make a serving class report when it begins a beam search.

    Each token of a beam is a request of the engine whose prompt is the beam so far. The prompt is
    therefore counted here, once.
    """
    search = serving.beam_search

    def beam_search(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        run = _run.get()
        if run is not None:
            run.searches_beams = True
            run.meter.prompt_tokens += serving._extract_prompt_len(prompt) or 0
        return search(prompt, *args, **kwargs)

    serving.beam_search = beam_search


class EngineCalls:
    """Wraps methods of one AsyncLLM's engine client and output processor in place."""

    def __init__(self, engine: AsyncLLM, progress: Progress) -> None:
        self._progress = progress
        self._states = engine.output_processor.request_states
        self._entries: dict[str, _Entry] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._input_processor = engine.input_processor
        self._add = engine.engine_core.add_request_async
        self._abort = engine.engine_core.abort_requests_async
        self._process = engine.output_processor.process_outputs
        engine.engine_core.add_request_async = self.add_request
        engine.engine_core.abort_requests_async = self.abort_requests
        engine.output_processor.process_outputs = self.process_outputs

    # --- in place of the engine client's methods --------------------------------------------------

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine process, or keep it until its run has room."""
        run = _run.get()
        if run is None:
            await self._add(request)
            return
        entry = self._entries[request.request_id] = _Entry(request, run)
        if run.waiting or not run.has_room(entry.streams):
            if self._prompt_of(request.request_id) not in run.prompts:
                # Until it is sent, the engine has no images of it, and other requests send them.
                forget(self._input_processor, request)
            run.waiting.append(entry)
            return
        try:
            await self._send(entry)
        except BaseException:
            self._leave(entry)
            raise

    async def _send(self, entry: _Entry) -> None:
        self._enter(entry)
        await self._add(entry.request)

    def _enter(self, entry: _Entry) -> None:
        run, entry.is_sent = entry.run, True
        run.streams += entry.streams
        if run.traced is not None and not run.searches_beams:
            state = self._states.get(entry.request.request_id)
            entry.spans = ChoiceSpans(run.traced, state, entry.streams - 1)
        prompt = self._prompt_of(entry.request.request_id)
        if prompt not in run.prompts and not run.searches_beams:
            run.prompts.add(prompt)
            length = length_from_prompt_token_ids_or_embeds(
                entry.request.prompt_token_ids, entry.request.prompt_embeds
            )
            run.meter.add_prompt(length, entry.same_prompts(), entry.negative_tokens)

    def _prompt_of(self, request_id: str) -> str:
        """An id that is the same for all choices of a prompt."""
        state = self._states.get(request_id)
        parent = state.parent_req if state is not None else None
        return request_id if parent is None else str(parent.request_id)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Abort what is in the engine process, and forget what has not been sent."""
        entries = {name: self._entries.get(name) for name in request_ids}
        known = [entry for entry in entries.values() if entry is not None]
        for entry in known:
            del self._entries[entry.request.request_id]
        for entry in known:
            self._leave(entry)
        await self._abort(
            [name for name, entry in entries.items() if entry is None or entry.is_sent]
        )

    def process_outputs(
        self, outputs: Sequence[Any], timestamp: float, *args: Any, **kwargs: Any
    ) -> Any:
        """As OutputProcessor.process_outputs, but counts tokens and reports progress to the engine.

        vLLM's method also removes tokens behind a stop string, so output tokens are counted after
        it. The engine waits if the frontend is behind (cfg_core/vllm_plugin/pace.py).
        """
        known = [
            (self._entries.get(output.request_id), output, guided_tokens(output))
            for output in outputs
        ]
        for entry, output, _ in known:
            if entry is not None:
                entry.run.meter.strengths.add(*token_strengths(output))
            if entry is not None and entry.spans is not None:
                entry.spans.note(follower_events(output))
            if output.mm_cache_miss_hashes:
                versions.chosen().tell_reason(output, MEDIA_LOST)
        result = self._process(outputs, timestamp, *args, **kwargs)
        self._progress.processed(timestamp)
        for entry, output, guided in known:
            if entry is None:
                continue
            tokens = len(output.new_token_ids)
            guided = min(guided, tokens)
            entry.tokens += tokens
            entry.run.meter.add_output(tokens, guided, entry.rows)
            entry.run.meter.longest = max(entry.run.meter.longest, entry.tokens)
            is_gone = output.request_id not in self._states
            if entry.spans is not None:
                entry.spans.seen(output.finish_reason, guided, timestamp, is_gone)
            if is_gone:
                self._leave(entry)
        return result

    # --- places in the engine ---------------------------------------------------------------------

    def _leave(self, entry: _Entry) -> None:
        """Remove a choice that has finished, failed or been aborted.

        The next choices of its run may then enter.
        """
        self._entries.pop(entry.request.request_id, None)
        spans, entry.spans = entry.spans, None
        if spans is not None:
            spans.end()
        run = entry.run
        for wake in run.wakes:
            wake.set()
        if entry.is_sent:
            run.streams -= entry.streams
        while run.waiting and (
            self._is_gone(run.waiting[0]) or run.has_room(run.waiting[0].streams)
        ):
            following = run.waiting.popleft()
            if not self._is_gone(following):
                self._enter(following)
                self._later(following)

    def _is_gone(self, entry: _Entry) -> bool:
        return self._entries.get(entry.request.request_id) is not entry

    def _later(self, entry: _Entry) -> None:
        task = asyncio.get_running_loop().create_task(self._send_late(entry))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_late(self, entry: _Entry) -> None:
        """Send a choice that waited.

        Its arrival time is now, so that it queues behind all requests that came while it waited.
        """
        if self._is_gone(entry):
            return
        entry.request.arrival_time = time.time()
        try:
            await self._add(entry.request)
        except Exception as error:
            state = self._states.get(entry.request.request_id)
            if state is not None and state.queue is not None:
                state.queue.put(error)  # `generate` raises it, and aborts
