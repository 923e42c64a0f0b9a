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
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from cfg_core.vllm_plugin import versions
from cfg_core.vllm_plugin.frontend.follower_media import forget
from cfg_core.vllm_plugin.pace import FrontendPace
from cfg_core.vllm_plugin.wire import follower_events, guided_tokens, token_strengths
from deployments.generator.engine.running_request import Choice, RunningRequest, current_request
from deployments.generator.engine.trace_spans import ChoiceSpans
from deployments.generator.moving.replays import Replay

MEDIA_LOST = (
    "The engine does not have an image, audio or video of the request any more: send the request"
    " again."
)
"""The reason if vLLM has sent the hash of an item alone, and the engine has dropped the item.

After this, vLLM sends it whole.
"""

REPLAYED_AT_ONCE = 64
"""Outputs of an answer that goes on here which are read before other tasks have their turn."""


def watch_beams(serving: Any) -> None:
    """Make a serving class report when it begins a beam search.

    Each token of a beam is a request of the engine whose prompt is the beam so far. The prompt is
    therefore counted here, once.
    """
    search = serving.beam_search

    def beam_search(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        run = current_request()
        if run is not None:
            run.searches_beams = True
            run.meter.prompt_tokens += serving._extract_prompt_len(prompt) or 0
        return search(prompt, *args, **kwargs)

    serving.beam_search = beam_search


class EngineCalls:
    """Wraps methods of one AsyncLLM's engine client and output processor in place."""

    def __init__(self, engine: AsyncLLM, progress: FrontendPace) -> None:
        self._progress = progress
        self._states = engine.output_processor.request_states
        self._entries: dict[str, Choice] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._input_processor = engine.input_processor
        self._abort_everywhere = engine.abort
        self._add = engine.engine_core.add_request_async
        self._abort = engine.engine_core.abort_requests_async
        self._process = engine.output_processor.process_outputs
        engine.engine_core.add_request_async = self.add_request
        engine.engine_core.abort_requests_async = self.abort_requests
        engine.output_processor.process_outputs = self.process_outputs

    # --- in place of the engine client's methods --------------------------------------------------

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine process, or keep it until its run has room."""
        run = current_request()
        if run is None:
            await self._add(request)
            return
        entry = self._entries[request.request_id] = Choice(request, run)
        if run.replay is None:
            await self._admit(entry)
        else:
            run.replay.add(request, self._states[request.request_id])

    async def _admit(self, entry: Choice) -> None:
        """Hand a choice to the engine process, or keep it until its run has room."""
        run, request = entry.run, entry.request
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

    async def _send(self, entry: Choice) -> None:
        self._enter(entry)
        await self._add(entry.request)

    def _enter(self, entry: Choice) -> None:
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

    async def replayed(
        self, run: RunningRequest, replay: Replay, outputs: AsyncGenerator[Any]
    ) -> AsyncGenerator[Any]:
        """Yield what vLLM makes of the outputs that another replica's engine has sent.

        Then the engine gets what is not complete, and the rest of `outputs` is its own. vLLM makes
        one output of an answer in one piece, at its end.
        """
        first = asyncio.ensure_future(anext(outputs))  # adds the request
        try:
            if not await replay.has_all(first):
                await first
            run.meter.go_on(replay.counts)
            for number, told in enumerate(replay.outputs(), 1):
                self._process(told, time.monotonic())
                if not replay.is_whole:
                    yield await (anext(outputs) if first.done() else first)
                if not number % REPLAYED_AT_ONCE:
                    await asyncio.sleep(0)
            await self._admit_rest(run, replay)
            if replay.is_whole:
                yield await first
        finally:
            first.cancel()

    async def _admit_rest(self, run: RunningRequest, replay: Replay) -> None:
        """Hand the choices to the engine process that were not complete elsewhere."""
        for entry in [entry for entry in self._entries.values() if entry.run is run]:
            entry.tokens = replay.length(entry.request)
            if entry.request.request_id in self._states:
                await self._admit(entry)
            else:
                self._leave(entry)

    @asynccontextmanager
    async def ending(self, run: RunningRequest) -> AsyncIterator[None]:
        """At the end of the block, abort what is left of a request, which nobody reads any more.

        vLLM does it when Python ends its generators. That may be later: a traceback may hold them.
        """
        try:
            yield
        finally:
            left = [name for name, entry in self._entries.items() if entry.run is run]
            if left:
                await self._abort_everywhere(left, internal=True)

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
        choices = [self._index_of(output.request_id) for output in outputs]
        for entry, output, _ in known:
            if entry is not None:
                entry.run.meter.strengths.add(*token_strengths(output))
            if entry is not None and entry.spans is not None:
                entry.spans.note(follower_events(output))
            if output.mm_cache_miss_hashes:
                versions.chosen().tell_reason(output, MEDIA_LOST)
        result = self._process(outputs, timestamp, *args, **kwargs)
        self._progress.processed(timestamp)
        for (entry, output, guided), choice in zip(known, choices, strict=True):
            if entry is None:
                continue
            if entry.run.recorder is not None:
                entry.run.recorder.note_of_engine(choice, output)
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

    def _index_of(self, request_id: str) -> int:
        """Which of its request's choices this is, counted from 0."""
        state = self._states.get(request_id)
        return 0 if state is None else int(state.request_index)

    # --- places in the engine ---------------------------------------------------------------------

    def _leave(self, entry: Choice) -> None:
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

    def _is_gone(self, entry: Choice) -> bool:
        return self._entries.get(entry.request.request_id) is not entry

    def _later(self, entry: Choice) -> None:
        task = asyncio.get_running_loop().create_task(self._send_late(entry))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_late(self, entry: Choice) -> None:
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
