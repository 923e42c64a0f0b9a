"""GuidedVLLMEngine: the engine of a replica of Ray Serve LLM, with guidance.

Ray's own class starts it and serves plain requests. Requests with guidance go to a VllmServer
around the same engine, which reads, checks and answers them as in a replica of ours.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware import Middleware
from typing_extensions import override

from cfg_core.errors import CfgServeError
from cfg_core.vllm_plugin import pace, vllm_patches
from cfg_core.vllm_plugin.config import ADDITIONAL_CONFIG
from deployments.config.admission import AdmissionArgs
from deployments.generator.engine.serving_engine import GeneratorEngine
from deployments.generator.grammar_gate import GrammarGate
from deployments.generator.ray_cluster import name_cluster
from deployments.generator.vllm_server import VllmServer
from deployments.messages import Chunk, GenerateCall, Whole
from deployments.ray_llm.answers import ray_answers, ray_error
from deployments.ray_llm.calls import body_of, read_call
from deployments.ray_llm.direct import GuidedRoutes
from deployments.ray_llm.ray_names import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    RawRequestInfo,
    VLLMEngine,
)
from deployments.requests.endpoints import Endpoint
from deployments.requests.usage import Meter


class GuidedVLLMEngine(VLLMEngine):
    """Made by Ray's LLMServer in its replica, for an LLMConfig that `guided` returned."""

    _engine_client: GeneratorEngine | None  # type: ignore[assignment] # Ray's code says None alone
    _server: VllmServer

    def __init__(self, llm_config: Any) -> None:
        vllm_patches.apply("frontend")
        super().__init__(llm_config)

    @override
    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any
    ) -> GeneratorEngine:
        """As Ray's, and the engine becomes one of ours. Its pace follows this event loop's."""
        grammars = GrammarGate(vllm_engine_config)
        with TemporaryDirectory(prefix="cfg-serve-") as folder:
            path = Path(folder) / "pace"
            pace.new_file(path)
            vllm_engine_config.additional_config[ADDITIONAL_CONFIG][pace.FILE] = str(path)
            client = super()._start_async_llm_engine(
                vllm_engine_args, vllm_engine_config, placement_group
            )
            return GeneratorEngine.adopt(client, pace.FrontendPace(path), grammars)

    @override
    async def start(self) -> None:
        """Start the engine, and return when it can answer. This takes minutes with a big model."""
        name_cluster()
        await super().start()
        engine = self._engine_client
        assert engine is not None, "Ray's class has started it"
        share = AdmissionArgs().streams_at_once(engine.vllm_config.scheduler_config.max_num_seqs)
        self._server = await VllmServer.around(engine, self._app_state, share, max_text_chars=0)

    @override
    async def shutdown(self) -> None:
        if self._engine_client is not None:
            self._engine_client.grammars.close()
        await super().shutdown()

    @override
    async def build_asgi_app(self) -> FastAPI:
        """As Ray's, for requests that do not pass its ingress. LLMServer adds middleware later."""
        app: FastAPI = await super().build_asgi_app()  # type: ignore[no-untyped-call]
        app.user_middleware.append(Middleware(GuidedRoutes, generate=self._generate))
        return app

    @override
    async def chat(  # type: ignore[override] # the protocol's annotation is not what Ray's does
        self, request: ChatCompletionRequest, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[Any, None]:
        """As Ray's, with guidance."""
        plain = super().chat(request, raw_request_info)
        async for item in self._answers("chat", request, raw_request_info, plain):
            yield item

    @override
    async def completions(  # type: ignore[override] # as above
        self, request: CompletionRequest, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[Any, None]:
        """As Ray's, with guidance."""
        plain = super().completions(request, raw_request_info)
        async for item in self._answers("completion", request, raw_request_info, plain):
            yield item

    async def _answers(
        self,
        endpoint: Endpoint,
        request: BaseModel,
        info: RawRequestInfo | None,
        plain: AsyncGenerator[Any, None],
    ) -> AsyncGenerator[Any, None]:
        """The answer to a request: `plain`, Ray's own, if it has nothing of ours in it."""
        try:
            headers = {} if info is None else info.headers
            call = read_call(endpoint, body_of(request), headers)
        except CfgServeError as error:
            yield ray_error(error)
            return
        answers = plain if call is None else ray_answers(self._generate(call), ANSWERS[endpoint])
        async for item in answers:
            yield item

    async def _generate(self, call: GenerateCall) -> AsyncGenerator[Chunk | Whole, None]:
        async with aclosing(self._server.generate(call, Meter())) as items:
            async for item in items:
                yield item


ANSWERS: dict[Endpoint, type[BaseModel]] = {
    "chat": ChatCompletionResponse,
    "completion": CompletionResponse,
}
"""Ray's classes of whole answers. They keep the guidance object, as a field that they do not
know."""
