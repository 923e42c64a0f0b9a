"""CfgRouter: the HTTP ingress. Validates requests, sends each whole to one replica of its model, maps errors.

It imports neither vllm nor torch: it is small, starts fast, and answers bad requests without bothering an engine.
The routes of the encoders are in encoder_routes.py.
"""

# No `from __future__ import annotations` here: Serve and FastAPI read the annotations of the routes.
# Serve pickles the routes when the class is made: what they call must be defined above it.

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve.handle import DeploymentHandle

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from deployments.admission import Share
from deployments.bodies import Bodies
from deployments.calls import value_of
from deployments.config import AppArgs
from deployments.demand import Demand, check_answer_size, check_context, check_streams, demand_of, num_tokens
from deployments.encoder_routes import EncoderRoutes
from deployments.encoders import Encoders
from deployments.generation import Generator, Job
from deployments.http_app import app, client_of, forwarded, json_text, tenant_of
from deployments.http_errors import UnknownModelError
from deployments.http_guard import Policy, enforce
from deployments.metrics import CONTENT_TYPE, Metrics
from deployments.pooling_protocol import read_detokenize, read_tokenize
from deployments.protocol import Endpoint, Guidance, read_guidance
from deployments.recent import Recent
from deployments.terms import PRIORITY, SOONEST, take_terms

_COUNT = re.compile(r'"count":\s*(\d+)')


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for generated text, read and checked without an engine."""

    body: dict[str, Any]
    guidance: Guidance | None
    demand: Demand


def count_of(tokenize_answer: str) -> int:
    """The `count` in an answer of /tokenize, which may hold a million tokens. Quotes inside its
    texts are escaped."""
    found = _COUNT.search(tokenize_answer)
    assert found is not None, "every answer of /tokenize has a count"
    return int(found[1])


@serve.deployment(max_ongoing_requests=100_000, health_check_period_s=1.0, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(app)
class CfgRouter(EncoderRoutes):
    """The public HTTP API, over the handles of the generator (a ModelReplica deployment), if there is one, and of
    the encoders (Embedder deployments, by served name)."""

    def __init__(
        self, generator: DeploymentHandle | None, encoders: dict[str, DeploymentHandle], args: AppArgs
    ) -> None:
        self._generator = Generator(generator, args) if generator else None
        ingress = serve.get_replica_context().replica_id.unique_id
        self._metrics = Metrics(ingress, (route.path for route in app.routes), self._gauges)
        policy = Policy.of(args.access, self._metrics, args.limits)
        enforce(policy)
        self._gate = policy.gate
        sleepers = [encoder.model_name for encoder in args.encoders if encoder.scales_to_zero]
        self._encoders = Encoders(encoders, args.model_name, args.ready_timeout_s, args.num_retries, sleepers)
        self._args = args
        self._bodies = Bodies()
        self._state = Recent(self._ask_state)
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
    async def models(self, request: Request) -> JSONResponse:
        """The served models that the caller may use: the generator and its adapters, then the encoders."""
        listed: dict[str, Any] = {"object": "list", "data": []}
        if self._generator:
            listed = json.loads(await value_of(self._generator.handle.models.remote()))
        listed["data"] += await self._encoders.cards(self._created)
        allowed = tenant_of(request).models
        listed["data"] = [card for card in listed["data"] if allowed is None or card["id"] in allowed]
        return JSONResponse(listed)

    @app.post("/tokenize")
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation, as the engine would see them."""
        body = await self._bodies.read(request)
        encoder = self._encoder_of(body, request)
        content = body.get("messages", body.get("prompt"))
        with self._gate.charge(tenant_of(request), num_tokens(content)) as charge:
            if encoder:
                text = await self._encoders.call(encoder, "tokenize", read_tokenize(body))
            else:
                text = await value_of(self._generator.handle.tokenize.remote(body, forwarded(request)))
            charge.settle(count_of(text))
        return json_text(text)

    @app.post("/detokenize")
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._bodies.read(request)
        encoder = self._encoder_of(body, request)
        tokens = num_tokens(body.get("tokens"))
        with self._gate.charge(tenant_of(request), tokens) as charge:
            if encoder:
                ids = read_detokenize(body, await self._encoders.info(encoder))
                text = await self._encoders.call(encoder, "detokenize", ids)
            else:
                text = await value_of(self._generator.handle.detokenize.remote(body, forwarded(request)))
            charge.settle(tokens)
        return json_text(text)

    @app.get("/metrics")
    async def metrics(self) -> Response:
        """Prometheus' text format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    def _gauges(self) -> dict[str, float]:
        return self._generator.gauges() if self._generator else {}

    @app.get("/health")
    async def health(self) -> JSONResponse:
        """Live: this process answers. It says nothing about the engines, see /ready."""
        return JSONResponse({"status": "live"})

    @app.get("/ready")
    async def ready(self) -> JSONResponse:
        """200 when every deployment can answer, with what each engine itself reports; else 503. However many ask, the
        engines are asked a few times a second (recent.py)."""
        return JSONResponse(await self._state.value())

    async def _ask_state(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._args.ready_timeout_s):
                engine, encoders = await asyncio.gather(self._engine_state(), self._encoders.states())
        except (CfgServeError, TimeoutError) as error:
            raise EngineDeadError(f"Not ready: {error or 'the engine did not answer in time'}") from None
        return {"status": "ready", **engine, "encoders": encoders}

    async def _engine_state(self) -> dict[str, Any]:
        return {"engine": await value_of(self._generator.handle.engine_state.remote())} if self._generator else {}

    def _encoder_of(self, body: Mapping[str, Any], request: Request) -> str | None:
        """The encoder that a request means, where every model can serve it; None: the generator."""
        name = body.get("model")
        if self._generator and name not in self._encoders:
            self._allow(request, name)
            return None
        if name is None and len(self._encoders.names) > 1:
            raise RequestError(f"model is missing: name one of {', '.join(self._encoders.names)}.", "model")
        encoder = self._encoders.known(self._encoders.names[0] if name is None else name)
        self._allow(request, encoder)
        return encoder

    def _allow(self, request: Request, name: object) -> None:
        """Raise PermissionDeniedError if the request's key may not use this model; None: the generator."""
        self._gate.allow_model(tenant_of(request), str(self._args.model_name if name is None else name))

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        """Check the request against everything that needs no engine, and let the generator answer it."""
        asked = await self._bodies.read(request, partial(self._read, endpoint))
        await self._encoders.refuse_generation(asked.body.get("model"))
        try:
            return await self._generator.answer(self._job(endpoint, asked, request))
        except UnknownModelError:
            raise self._encoders.unknown(str(asked.body.get("model"))) from None

    def _read(self, endpoint: Endpoint, body: dict[str, Any]) -> Asked:
        """What can be told of a body alone. May run in a thread."""
        self._args.grammars.bounds.check_body(body)
        guidance = read_guidance(body, endpoint)
        check_answer_size(endpoint, body, self._args.limits.max_answer_bytes)
        demand = demand_of(endpoint, body, guidance)
        check_streams(demand, self._args.admission.max_streams_per_request)
        return Asked(body=body, guidance=guidance, demand=demand)

    def _job(self, endpoint: Endpoint, asked: Asked, request: Request) -> Job:
        tenant, body = tenant_of(request), asked.body
        self._allow(request, body.get("model"))
        check_context(endpoint, body, self._generator.context_tokens())
        limits = tenant.limits
        terms = take_terms(
            body,
            request.headers,
            default_timeout_s=self._args.admission.default_timeout_s,
            min_priority=SOONEST if limits.min_priority is None else limits.min_priority,
        )
        if not self._args.engine_orders_by_priority:
            body.pop(PRIORITY, None)
        return Job(
            endpoint=endpoint,
            body=body,
            guidance=asked.guidance,
            headers=forwarded(request, self._args.share_prefixes),
            share=Share(tenant=client_of(request), weight=limits.weight, max_streams=limits.max_streams),
            terms=terms,
            demand=asked.demand,
            charge=self._gate.charge(tenant, asked.demand.tokens),
        )
