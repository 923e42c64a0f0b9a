"""CfgRouter: the HTTP ingress. Validates requests, sends each whole to one replica of its model, maps errors.

It imports neither vllm nor torch: it is small, starts fast, and answers bad requests without bothering an engine.
The routes of the encoders are in encoder_routes.py.
"""

# No `from __future__ import annotations` here: Serve and FastAPI read the annotations of the routes.
# Serve pickles the routes when the class is made: what they call must be defined above it.

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from deployments.calls import EventStream, events, next_item, value_of
from deployments.config import AppArgs
from deployments.encoder_routes import EncoderRoutes
from deployments.encoders import Encoders
from deployments.http_app import RETRY_DELAY_S, app, forwarded, json_text
from deployments.http_errors import UnknownModelError
from deployments.pooling_protocol import read_detokenize, read_tokenize
from deployments.protocol import Endpoint, decode_body, read_guidance


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(app)
class CfgRouter(EncoderRoutes):
    """The public HTTP API, over the handles of the generator (a ModelReplica deployment), if there is one, and of
    the encoders (Embedder deployments, by served name)."""

    def __init__(
        self, generator: DeploymentHandle | None, encoders: dict[str, DeploymentHandle], args: AppArgs
    ) -> None:
        self._generator = generator
        self._generate = generator.options(method_name="generate", stream=True) if generator else None
        self._encoders = Encoders(encoders, args.model_name, args.ready_timeout_s, args.num_retries)
        self._args = args
        self._created = int(time.time())

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """OpenAI completions, with the guidance fields beside OpenAI's."""
        return await self._respond("completion", request)

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """OpenAI chat completions, with the guidance fields beside OpenAI's."""
        return await self._respond("chat", request)

    @app.get("/v1/models")
    async def models(self) -> JSONResponse:
        """The served models: the generator and its adapters, then the encoders."""
        listed: dict[str, Any] = {"object": "list", "data": []}
        if self._generator:
            listed = json.loads(await value_of(self._generator.models.remote()))
        listed["data"] += await self._encoders.cards(self._created)
        return JSONResponse(listed)

    @app.post("/tokenize")
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation, as the engine would see them."""
        body = decode_body(await request.body())
        if encoder := self._encoder_of(body):
            return json_text(await self._encoders.call(encoder, "tokenize", read_tokenize(body)))
        return json_text(await value_of(self._generator.tokenize.remote(body, forwarded(request))))

    @app.post("/detokenize")
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = decode_body(await request.body())
        if encoder := self._encoder_of(body):
            tokens = read_detokenize(body, await self._encoders.info(encoder))
            return json_text(await self._encoders.call(encoder, "detokenize", tokens))
        return json_text(await value_of(self._generator.detokenize.remote(body, forwarded(request))))

    @app.get("/health")
    async def health(self) -> JSONResponse:
        """Live: this process answers. It says nothing about the engines, see /ready."""
        return JSONResponse({"status": "live"})

    @app.get("/ready")
    async def ready(self) -> JSONResponse:
        """200 when every deployment can answer, with what each engine itself reports; else 503."""
        try:
            async with asyncio.timeout(self._args.ready_timeout_s):
                engine, encoders = await asyncio.gather(self._engine_state(), self._encoders.states())
        except (CfgServeError, TimeoutError) as error:
            raise EngineDeadError(f"Not ready: {error or 'the engine did not answer in time'}") from None
        return JSONResponse({"status": "ready", **engine, "encoders": encoders})

    async def _engine_state(self) -> dict[str, Any]:
        return {"engine": await value_of(self._generator.engine_state.remote())} if self._generator else {}

    def _encoder_of(self, body: Mapping[str, Any]) -> str | None:
        """The encoder that a request means, where every model can serve it; None: the generator."""
        name = body.get("model")
        if self._generator:
            return name if name in self._encoders else None
        if name is None and len(self._encoders.names) > 1:
            raise RequestError(f"model is missing: name one of {', '.join(self._encoders.names)}.", "model")
        return self._encoders.known(self._encoders.names[0] if name is None else name)

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        """Check the request, send it to one replica, and answer when the first item is there.

        So an error before the first byte has its own HTTP status, in streams too.
        """
        body = decode_body(await request.body())
        await self._encoders.refuse_generation(body.get("model"))
        guidance = read_guidance(body, endpoint)
        try:
            items, first = await self._open(endpoint, body, guidance, forwarded(request))
        except UnknownModelError:
            raise self._encoders.unknown(str(body.get("model"))) from None
        if first.startswith("data:"):
            return EventStream(events(items, first))
        return json_text(first)

    async def _open(self, *call) -> tuple[DeploymentResponseGenerator, str]:
        """The items of a replica's answer, and the first of them. A lost engine is tried again elsewhere:
        the client has seen nothing of it. Any other error is raised."""
        for retries_left in reversed(range(self._args.num_retries + 1)):
            items = self._generate.remote(*call)
            try:
                return items, await next_item(items)
            except EngineDeadError:
                if not retries_left:
                    raise
                await asyncio.sleep(RETRY_DELAY_S)
            except asyncio.CancelledError:
                items.cancel()
                raise
