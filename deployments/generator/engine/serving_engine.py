"""vLLM's AsyncLLM, with what every request of a replica passes, whatever its endpoint.

Grammars are tried before vLLM reads them (grammar_gate.py), what a request has in the engine
process is counted and bounded (calls.py), streams come in chunks (answers/chunks.py), and a
request that failed in the engine gets the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.exceptions import GenerationError
from vllm.outputs import CompletionOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from cfg_core.errors import REQUEST_FAULT
from cfg_core.vllm_plugin.pace import FrontendPace
from deployments.generator.answers.chunks import ChunkSpacing
from deployments.generator.engine.calls import EngineCalls
from deployments.generator.engine.running_request import current_request
from deployments.generator.grammar_gate import GrammarGate
from deployments.generator.refusals.engine_errors import client_error


class GeneratorEngine(AsyncLLM):  # type: ignore[misc] # vLLM is not typed
    """vLLM's engine, as a replica serves it. Used from one event loop."""

    calls: EngineCalls
    grammars: GrammarGate
    _chunks: ChunkSpacing

    @classmethod
    def start(
        cls,
        config: VllmConfig,
        progress: FrontendPace,
        grammars: GrammarGate,
        disable_log_stats: bool,
    ) -> GeneratorEngine:
        """Start the engine in a process of its own. This takes minutes with a big model."""
        engine: GeneratorEngine = cls.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[RayPrometheusStatLogger],
            disable_log_stats=disable_log_stats,
        )
        return engine._equipped(progress, grammars)

    @classmethod
    def adopt(
        cls, engine: AsyncLLM, progress: FrontendPace, grammars: GrammarGate
    ) -> GeneratorEngine:
        """Make `engine`, which others have started, one of ours, and return it.

        Its class may be a subclass of AsyncLLM, whose methods still run.
        """
        kind = type(engine)
        engine.__class__ = cls if kind is AsyncLLM else type(cls.__name__, (cls, kind), {})
        adopted: GeneratorEngine = engine
        return adopted._equipped(progress, grammars)

    def _equipped(self, progress: FrontendPace, grammars: GrammarGate) -> GeneratorEngine:
        self.calls = EngineCalls(self, progress)
        self.grammars = grammars
        self._chunks = ChunkSpacing()
        return self

    @override
    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """As AsyncLLM's, in chunks, and a request that failed in the engine fails with the reason.

        The reason is, for example, what its logits processor raised. The scheduler leaves it in
        `stop_reason`, and vLLM's serving classes would not report it.
        """
        run, wake = current_request(), asyncio.Event()
        wakes = set() if run is None else run.wakes
        wakes.add(wake)
        outputs = super().generate(*args, **kwargs)
        recorder = None if run is None else run.recorder
        if recorder is not None:
            recorder.begin(kwargs.get("sampling_params", args[1] if len(args) > 1 else None))
        async with aclosing(outputs), aclosing(self._chunks.spaced(outputs, wake)) as spaced:
            try:
                if run is not None and run.replay is not None:
                    replayed = self.calls.replayed(run, run.replay, outputs)
                    async with aclosing(replayed):
                        async for output in replayed:
                            for sample in output.outputs:
                                check_finished(sample)
                            yield output
                async for output in spaced:
                    for sample in output.outputs:
                        check_finished(sample)
                    if recorder is not None:
                        recorder.note(output)
                    yield output
            except Exception as error:
                if run is not None:
                    run.failure = error
                raise
            finally:
                wakes.discard(wake)

    @override
    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As AsyncLLM's, for grammars that pass. An error caused by a wrong type is the client's.

        vLLM reads the request's fields there without a check of their types.
        """
        await self.grammars.admit(params)
        try:
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        except Exception as error:
            refused = client_error(error)
            if refused is None or refused is error:
                raise
            raise refused from error


def check_finished(sample: CompletionOutput) -> None:
    """Raise GenerationError if a choice ended before it was complete.

    Its status is 400 if the request failed because of what it asked for. When a request is aborted
    because its client left, nobody reads its output. So an abort that is seen here is a failure,
    which some of vLLM's endpoints would report as a complete answer.
    """
    if sample.finish_reason == "error" and sample.stop_reason:
        error = GenerationError(str(sample.stop_reason))
        if str(error).startswith(REQUEST_FAULT):
            error.status_code = HTTPStatus.BAD_REQUEST
        raise error
    if sample.finish_reason == "abort":
        raise GenerationError(
            "The engine stopped before the output was complete: send the request again."
        )
