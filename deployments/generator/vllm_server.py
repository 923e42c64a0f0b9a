"""VllmServer: a guided vLLM engine behind vLLM's own OpenAI serving classes."""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pydantic
import vllm
from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from cfg_core.cpu_features import CPUINFO, read
from cfg_core.errors import EngineError
from cfg_core.vllm_plugin import guided_engine_args, pace, versions
from cfg_core.vllm_plugin.config import ADDITIONAL_CONFIG, merged
from cfg_core.vllm_plugin.frontend.follower_media import PENDING
from deployments import serve_patches
from deployments.config.args import AppArgs
from deployments.generator import endpoints
from deployments.generator.answers import sse
from deployments.generator.answers.incomplete import align_with_streams
from deployments.generator.answers.logprobs import show_stream_logprobs
from deployments.generator.answers.report import Outcome, guidance_report, note_of
from deployments.generator.answers.small import SmallAnswers
from deployments.generator.answers.texts import text_of
from deployments.generator.engine.calls import watch_beams
from deployments.generator.engine.cpu_dtype import with_cpu_dtype
from deployments.generator.engine.renderer_lanes import use_lanes
from deployments.generator.engine.running_request import RunningRequest
from deployments.generator.engine.serving_engine import GeneratorEngine
from deployments.generator.engine.trace_spans import TracedRequest
from deployments.generator.grammar_gate import GrammarGate
from deployments.generator.guided_requests import GuidedRequests, PreparedRequest
from deployments.generator.http_context import HttpContext
from deployments.generator.media import connector
from deployments.generator.media.in_bodies import reading_media
from deployments.generator.media.turns import take_turns
from deployments.generator.moving.model_fingerprint import of_engine
from deployments.generator.moving.recorder import Recorder
from deployments.generator.moving.replays import Replay
from deployments.generator.refusals.engine_errors import naming, own_errors, reading
from deployments.messages import OTHER_MODEL, Chunk, GenerateCall, Whole
from deployments.observability.client_texts import hide_client_texts
from deployments.observability.spans import TRACE_HEADERS, Span
from deployments.requests.usage import Meter


class VllmServer:
    """One guided vLLM engine behind vLLM's OpenAI serving classes, without HTTP.

    Whatever its methods raise is a CfgServeError: no class of vLLM may leave the replica, because
    unpickling it elsewhere would import vllm.

    small: what it answers at once.
    model: the fingerprint of what it computes with (moving/model_fingerprint.py).
    """

    def __init__(
        self,
        engine: GeneratorEngine,
        state: State,
        share: int,
        max_text_chars: int,
        model: str = "",
    ) -> None:
        self._engine = engine
        self.model = model
        self._state = state
        self._share = share
        self.small = SmallAnswers(engine, state, max_text_chars)
        self._requests = GuidedRequests(engine, state)
        self._vocabulary = engine.model_config.get_vocab_size()

    @classmethod
    async def start(cls, app: AppArgs, placement_group: Any = None) -> VllmServer:
        """Start the engine in a process of its own, and return when it can answer.

        This takes minutes with a big model.

        placement_group: the workers of Ray's executor take its bundles.
        """
        connector.set_limits()
        engine_kwargs = app.engine_kwargs()
        if current_platform.is_cpu():
            engine_kwargs = with_cpu_dtype(engine_kwargs, read(CPUINFO))
        args = AsyncEngineArgs(**merged(engine_kwargs, guided_engine_args(**app.plugin_kwargs)))
        with TemporaryDirectory(prefix="cfg-serve-") as folder:
            path = Path(folder) / "pace"
            pace.new_file(path)
            args.additional_config[ADDITIONAL_CONFIG][pace.FILE] = str(path)
            config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            if placement_group is not None:
                config.parallel_config.placement_group = placement_group
            grammars = GrammarGate(config)
            await asyncio.sleep(0.1)  # it starts its process; the engine holds this loop for long
            engine = GeneratorEngine.start(
                config, pace.FrontendPace(path), grammars, args.disable_log_stats
            )
        state = State()
        options = argparse.Namespace(**{**vars(frontend_args(app.frontend)), **vars(args)})
        await init_app_state(engine, state, options, await engine.get_supported_tasks())
        use_lanes(engine.renderer)
        take_turns(engine.renderer)
        hide_client_texts()
        share = app.admission.streams_at_once(config.scheduler_config.max_num_seqs)
        of_yaml = {"frontend": app.frontend, "logits_processors": app.logits_processors}
        model = await asyncio.to_thread(of_engine, config, vllm.__version__, of_yaml)
        return await cls.around(engine, state, share, app.max_text_chars, model)

    @classmethod
    async def around(
        cls,
        engine: GeneratorEngine,
        state: State,
        share: int,
        max_text_chars: int,
        model: str = "",
    ) -> VllmServer:
        """A server around an engine that runs, with the state of vLLM's API server in front of it.

        share: streams that one request may have in the engine at once.
        max_text_chars: of texts that are only tokenized or rendered.
        model: its fingerprint (moving/model_fingerprint.py).
        """
        show_stream_logprobs(state)
        align_with_streams(state)
        serve_patches.apply(serve_patches.REPLICA)
        for serving in (state.openai_serving_completion, state.openai_serving_chat):
            watch_beams(serving)
        await engine.grammars.loaded()
        return cls(engine, state, share, max_text_chars, model)

    @property
    def errored(self) -> bool:
        """True once the engine is dead, for good."""
        return bool(self._engine.errored)

    async def check_health(self) -> None:
        """Raise if the engine process is dead; this is cheap, because it asks only this process."""
        with own_errors():
            await self._engine.check_health()

    async def stats(self) -> dict[str, int]:
        """Requests and blocks as the scheduler holds them now.

        This asks the engine process itself.
        """
        with own_errors():
            stats: dict[str, int] = await self._engine.engine_core.call_utility_async(
                "guidance_stats"
            )
            return stats

    def shutdown(self) -> None:
        self._engine.grammars.close()
        self._engine.shutdown()

    # --- generation ---------------------------------------------------------------------------

    def recorder(self, call: GenerateCall, meter: Meter) -> Recorder:
        """What is told of the answer of a call, for `generate`."""
        return Recorder(meter, call.endpoint, self.model, is_whole=not call.body.get("stream"))

    async def generate(
        self,
        call: GenerateCall,
        meter: Meter,
        span: Span | None = None,
        recorder: Recorder | None = None,
    ) -> AsyncGenerator[Chunk | Whole, None]:
        """Serve one request, leader and negative.

        Yields the chunks of a stream as vLLM words them, or the pieces of one JSON text. Raises
        RequestError before the first item if the request can never be served, and EngineError if it
        was begun with another model. Closing the iterator, or cancelling the task that waits for
        it, aborts the group in the engine.

        meter: must be new; holds at any moment what the engine has done for this request.
        span: the request's span in this process, if it is traced.
        recorder: what `recorder` returned, if the caller tells what it says.
        """
        if call.begun is not None and call.begun.model != self.model:
            raise EngineError(OTHER_MODEL)
        recorder = recorder or self.recorder(call, meter)
        traced = traced_of(call, span)
        begun = call.begun if call.begun is not None and call.begun.outputs else None
        replay = None if begun is None else Replay(begun, recorder.is_whole)
        run = RunningRequest(meter, self._share, traced, recorder, replay)
        call = replace(call, headers=self._headers(call.headers, span))
        renderer = self._engine.renderer
        readable = reading_media(renderer, call.endpoint, call.body, run.has_begun, call.client)
        with naming(call.endpoint, call.body), own_errors(), readable:
            with reading(call.body), span.child("render") if span is not None else nullcontext():
                await self._engine.grammars.read_body(call.body, call.client)
                made = await self._requests.make(call)
            with PENDING.holding(made.pending):
                async with self._engine.calls.ending(run):
                    run.begin()
                    output = await self._first(call, made.request, run)
                    report = functools.partial(self._report, call, made, meter)
                    if isinstance(output, pydantic.BaseModel):
                        text = await text_of(call.endpoint, output)
                        for piece in sse.pieces(sse.complete(text, report())):
                            yield Whole(piece)
                        return
                    async with aclosing(output):
                        told = run.within(output)
                        chunks = sse.chunks(call.endpoint, told, report, run.own_failure)
                        async for chunk in chunks:
                            yield Chunk(chunk, progress=recorder.take())

    def _report(
        self, call: GenerateCall, made: PreparedRequest, meter: Meter
    ) -> dict[str, Any] | None:
        """The `guidance` object of an answer. None without guidance."""
        guidance = call.guidance or made.in_xargs
        if guidance is None:
            return None
        outcome = Outcome(
            longest=meter.longest,
            guided=meter.guided_tokens,
            vocabulary=self._vocabulary,
            same=meter.same or frozenset(),
            has_no_tokens=made.has_no_tokens,
        )
        note = note_of(call.endpoint, call.body, guidance, outcome)
        is_known = call.guidance is not None and not guidance.params.has_suffix
        tokens = made.negative_tokens if is_known else meter.negative_tokens
        return guidance_report(
            guidance, tokens, meter.guided_tokens, note, meter.strengths, meter.plain_tokens
        )

    def _headers(self, given: Mapping[str, str], span: Span | None) -> dict[str, str]:
        """Headers for vLLM, which warns of a trace's if it does not trace by itself."""
        if self._engine.vllm_config.observability_config.otlp_traces_endpoint is None:
            return {name: value for name, value in given.items() if name not in TRACE_HEADERS}
        return {**given, **(span.headers if span is not None else {})}

    async def _first(self, call: GenerateCall, request: Any, run: RunningRequest) -> Any:
        """vLLM's response, or the iterator of its stream.

        What fails before the request is in the engine was caused by the client.
        """
        try:
            context = HttpContext(call.headers)
            return await endpoints.create(call.endpoint, self._state, request, context)
        except Exception:
            if run.has_begun():
                raise
            with reading(call.body):
                raise


def traced_of(call: GenerateCall, span: Span | None) -> TracedRequest | None:
    """What the spans of the call's streams need; None if it is not traced."""
    if span is None:
        return None
    if call.guidance is None or not call.guidance.enabled:
        return TracedRequest(span)
    return TracedRequest(span, call.guidance.params.weights)


def frontend_args(frontend: Mapping[str, Any]) -> Any:
    """vLLM's object for the `frontend` of AppArgs."""
    adapters = [LoRAModulePath(**adapter) for adapter in frontend.get("lora_modules", ())]
    return versions.chosen().frontend_args({**frontend, "lora_modules": adapters or None})
