"""CfgRouter: the HTTP ingress. Validates guidance, sends each request whole to one replica, maps errors.

It imports no vllm: it is small, starts fast, and answers bad requests without bothering an engine.
"""

# No `from __future__ import annotations` here: Serve and FastAPI read the annotations of the routes.
# Serve pickles the routes when the class is made: what they call must be defined above it.

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.exceptions import HTTPException

from cfg_core.errors import CfgServeError, EngineDeadError
from deployments.calls import EventStream, events, next_item, value_of
from deployments.config import AppArgs
from deployments.http_errors import error_body, http_error
from deployments.protocol import Endpoint, decode_body, read_guidance

FORWARDED_HEADERS = ("x-request-id", "x-session-id", "traceparent", "tracestate")
"""Headers that vLLM's serving classes read; nothing else of the client's leaves the ingress."""

RETRY_DELAY_S = 1.0
"""Longer than a replica survives its engine (replica.py), so that a retry does not meet it again."""

app = FastAPI(title="cfg-serve", description="OpenAI-compatible API with classifier-free guidance.")


@app.exception_handler(CfgServeError)
async def _on_own_error(request: Request, error: CfgServeError) -> JSONResponse:
    answer = http_error(error)
    return JSONResponse(answer.body, answer.status, answer.headers)


@app.exception_handler(HTTPException)
async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Unknown paths and wrong methods, in OpenAI's shape."""
    body = error_body(
        f"{request.method} {request.url.path}: {error.detail}.", error.status_code, "invalid_request_error"
    )
    return JSONResponse(body, error.status_code, error.headers)


def _forwarded(request: Request) -> dict[str, str]:
    return {name: value for name in FORWARDED_HEADERS if (value := request.headers.get(name)) is not None}


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(app)
class CfgRouter:
    """The public HTTP API, over the handle of one ModelReplica deployment."""

    def __init__(self, replica: DeploymentHandle, args: AppArgs) -> None:
        self._replica = replica
        self._generate = replica.options(method_name="generate", stream=True)
        self._args = args

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """OpenAI completions, with the guidance fields beside OpenAI's."""
        return await self._respond("completion", request)

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """OpenAI chat completions, with the guidance fields beside OpenAI's."""
        return await self._respond("chat", request)

    @app.get("/v1/models")
    async def models(self) -> Response:
        """The served model and its adapters."""
        return _json(await value_of(self._replica.models.remote()))

    @app.post("/tokenize")
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation, as the engine would see them."""
        body = decode_body(await request.body())
        return _json(await value_of(self._replica.tokenize.remote(body, _forwarded(request))))

    @app.post("/detokenize")
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = decode_body(await request.body())
        return _json(await value_of(self._replica.detokenize.remote(body, _forwarded(request))))

    @app.get("/health")
    async def health(self) -> JSONResponse:
        """Live: this process answers. It says nothing about the engine, see /ready."""
        return JSONResponse({"status": "live"})

    @app.get("/ready")
    async def ready(self) -> JSONResponse:
        """200 when every deployment can answer, with what the engine process itself reports; else 503."""
        try:
            async with asyncio.timeout(self._args.ready_timeout_s):
                state = await value_of(self._replica.engine_state.remote())
        except (CfgServeError, TimeoutError) as error:
            raise EngineDeadError(f"Not ready: {error or 'the engine did not answer in time'}") from None
        return JSONResponse({"status": "ready", "engine": state})

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        """Check the request, send it to one replica, and answer when the first item is there.

        So an error before the first byte has its own HTTP status, in streams too.
        """
        body = decode_body(await request.body())
        guidance = read_guidance(body, endpoint)
        items, first = await self._open(endpoint, body, guidance, _forwarded(request))
        if first.startswith("data:"):
            return EventStream(events(items, first))
        return _json(first)

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
