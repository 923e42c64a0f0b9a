"""CfgRouter: the HTTP ingress, which checks requests and sends each to one replica of its model.

It imports neither vllm nor torch, so it is small, starts fast, and refuses bad requests without
involving an engine. Its routes are in this module and in those named ..._routes.py.
"""

# No `from __future__ import annotations`, and the class comes last: see ingress/app.py.

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.routing import Route

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from deployments.config.args import AppArgs
from deployments.health.replica_health import health
from deployments.http.recent import Recent
from deployments.http.text_answers import json_answer
from deployments.ingress.app import app, forwarded_headers, tenant_of
from deployments.ingress.bodies import Bodies
from deployments.ingress.metrics import CONTENT_TYPE, Metrics, Reading
from deployments.ingress.policy import Policy, enforce
from deployments.ingress.routes.docs import DocsRoutes
from deployments.ingress.routes.encode import EncodeRoutes
from deployments.ingress.routes.generate import GenerateRoutes
from deployments.ingress.routes.playground import PlaygroundRoutes
from deployments.ingress.routes.vllm import VllmRoutes
from deployments.observability import spans
from deployments.replica_client.encoders import Encoders
from deployments.replica_client.generators import Generators
from deployments.requests.encode.capabilities import invoked
from deployments.requests.encode.tokens import count_of
from deployments.requests.streams import num_tokens
from deployments.routing.dispatches import placements


@serve.deployment(
    max_ongoing_requests=100_000,
    health_check_period_s=1.0,  # only this check finds out that an ingress died
    ray_actor_options={"num_cpus": 0.1},
)
@serve.ingress(app)
class CfgRouter(GenerateRoutes, EncodeRoutes, VllmRoutes, DocsRoutes, PlaygroundRoutes):
    """The public HTTP API.

    generators: the handles of the ModelReplica deployments, by served name.
    encoders: the handles of the Embedder deployments, by served name.
    """

    def __init__(
        self,
        generators: dict[str, DeploymentHandle[Any]],
        encoders: dict[str, DeploymentHandle[Any]],
        args: AppArgs,
    ) -> None:
        ingress = serve.get_replica_context().replica_id.unique_id
        spans.start(args.tracing, process="ingress", replica=ingress)
        paths = (route.path for route in app.routes if isinstance(route, Route))
        several = len(args.generator_names) > 1
        self._metrics = Metrics(
            ingress, paths, self._reading, lambda: self._generators.readings(), several
        )
        self._generators = Generators(generators, args, self._metrics.waited)
        policy = Policy.of(args.access, self._metrics, args.limits, args.http)
        enforce(policy)
        self._gate = policy.gate
        self._open_requests = policy.open_requests
        self._encoders = Encoders(encoders, args)
        self._args = args
        self._bodies = Bodies(args.limits)
        self._state = Recent(self._ask_state)
        self._created = int(time.time())

    @app.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        """List the served models that the caller may use: generators, adapters and encoders."""
        allowed = tenant_of(request).models
        cards = await self._cards()
        shown = [card for card in cards if allowed is None or card["id"] in allowed]
        return JSONResponse({"object": "list", "data": shown})

    @app.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> JSONResponse:
        """Return one of the served models; its name may have slashes."""
        self._gate.allow_model(tenant_of(request), model)
        for card in await self._cards():
            if card["id"] == model:
                return JSONResponse(card)
        raise self._encoders.unknown(model)

    async def _cards(self) -> list[dict[str, Any]]:
        generators, encoders = await asyncio.gather(
            self._generators.cards(self._created), self._encoders.cards(self._created)
        )
        return generators + encoders

    @app.post("/invocations")
    async def invocations(self, request: Request) -> Response:
        """Answer a chat, a completion or an encoder's request, told apart by its fields.

        SageMaker sends all requests here.
        """
        body = await self._bodies.read(request)
        if "messages" in body or "prompt" in body:
            return await self._generate("chat" if "messages" in body else "completion", request)
        return await self._compute(invoked(body), request)

    @app.post("/tokenize")
    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or of a conversation, as the engine would see them."""
        body = await self._bodies.read(request)
        encoder = self._encoder_of(body, request)
        if encoder is not None:
            return await self._tokenize_with(encoder, body, request)
        tenant = tenant_of(request)
        generator = await self._generator_of(body.get("model"), tenant)
        content = body.get("messages", body.get("prompt"))
        with self._gate.charge(tenant, num_tokens(content)) as charge:
            text = await generator.ask("tokenize", body, forwarded_headers(request))
            charge.settle(count_of(text))
        return json_answer(text)

    @app.post("/detokenize")
    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._bodies.read(request)
        encoder = self._encoder_of(body, request)
        if encoder is not None:
            return await self._detokenize_with(encoder, body, request)
        tenant = tenant_of(request)
        generator = await self._generator_of(body.get("model"), tenant)
        tokens = num_tokens(body.get("tokens"))
        with self._gate.charge(tenant, tokens) as charge:
            text = await generator.ask("detokenize", body, forwarded_headers(request))
            charge.settle(tokens)
        return json_answer(text)

    @app.get("/metrics")
    async def metrics(self) -> Response:
        """Return the metrics, in Prometheus' text format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    def _reading(self) -> Reading:
        """What is of no single generator; Generators.readings has the rest."""
        generators: Reading = {}
        if self._generators:
            generators = {"placements": placements(), "replica_failures": health().failures()}
        requests = {"open_requests": self._open_requests.count}
        return {**requests, **generators, **self._encoders.reading()}

    @app.get("/health")
    async def health(self) -> JSONResponse:
        """Say that this process is live.

        The answer says nothing about the engines; /ready does.
        """
        return JSONResponse({"status": "live"})

    @app.get("/ready")
    async def ready(self) -> JSONResponse:
        """Answer 200 if every deployment can answer, with what each engine reports; else 503.

        However many clients ask, the engines are asked only a few times a second (http/recent.py).
        """
        return JSONResponse(await self._state.value())

    async def _ask_state(self) -> dict[str, Any]:
        try:
            engines, encoders = await asyncio.gather(
                self._generators.states(), self._encoders.states()
            )
        except CfgServeError as error:
            raise EngineDeadError(f"Not ready: {error}") from None
        return {"status": "ready", **engines, "encoders": encoders}

    def _encoder_of(self, body: Mapping[str, Any], request: Request) -> str | None:
        """Return the encoder that a request means; None if it means a generator.

        This is for endpoints that every model can serve.
        """
        name = body.get("model")
        if self._generators and name not in self._encoders:
            return None
        if name is None and len(self._encoders.names) > 1:
            raise RequestError(
                f"model is missing: name one of {', '.join(self._encoders.names)}.", "model"
            )
        encoder = self._encoders.known(self._encoders.names[0] if name is None else name)
        self._gate.allow_model(tenant_of(request), encoder)
        return encoder
