"""Requests that go past Ray's ingress: what the middleware answers, and what it lets through."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cfg_core.errors import EngineError, RequestError
from deployments.messages import Chunk, GenerateCall, Whole
from deployments.ray_llm.direct import PATHS, GuidedRoutes
from tests.serve.ray_llm.bodies import CHATS, COMPLETIONS, OPTIONS, PROMPTS, answer, streamed
from tests.serve.ray_llm.process import RayLlmProcess, llm_config
from tools.serving.process import REPOSITORY, Json, haproxy_env

GUIDED: Json = {"prompt": "Once", "guidance_scale": 3.0}


async def generate(call: GenerateCall) -> AsyncGenerator[Chunk | Whole, None]:
    """Stands in for VllmServer: what it answers depends on `max_tokens`."""
    kind = call.body.get("max_tokens")
    assert "guidance_scale" not in call.body
    if kind == 1:
        raise RequestError("too long", "prompt")
    if call.body.get("stream"):
        yield Chunk("data: {}\n\n")
        if kind == 2:
            raise EngineError("lost")
        yield Chunk("data: [DONE]\n\n")
        return
    yield Whole('{"guided":')
    yield Whole(f'"{call.endpoint}"}}')


async def vllm(request: Request) -> Response:
    """Stands in for vLLM's routes."""
    return JSONResponse({"plain": (await request.body()).decode()})


def client() -> httpx.AsyncClient:
    routes = [Route(path, vllm, methods=["POST"]) for path in (*PATHS, "/tokenize")]
    app = Starlette(routes=routes, middleware=[Middleware(GuidedRoutes, generate=generate)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_guided_request_is_answered_here(path: str) -> None:
    found = await client().post(path, json=GUIDED)
    assert (found.status_code, found.json()) == (200, {"guided": PATHS[path]})


@pytest.mark.parametrize(
    ("path", "content"),
    [
        *((path, b'{"prompt": "Once"}') for path in PATHS),
        ("/tokenize", json.dumps(GUIDED).encode()),
        ("/v1/completions", b"no JSON"),
        ("/v1/completions", b"[1]"),
    ],
)
async def test_other_requests_go_through_as_they_came(path: str, content: bytes) -> None:
    found = await client().post(path, content=content)
    assert (found.status_code, found.json()) == (200, {"plain": content.decode()})


@pytest.mark.parametrize("path", [*PATHS])
async def test_a_wrong_field_is_refused_on_each_route(path: str) -> None:
    found = await client().post(path, json={"prompt": "Once", "guidance_scal": 3.0})
    assert found.status_code == 400
    assert "Did you mean guidance_scale?" in found.json()["error"]["message"]


async def test_failures_before_and_after_the_first_byte() -> None:
    found = await client().post("/v1/completions", json={**GUIDED, "max_tokens": 1})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")
    streaming = {**GUIDED, "stream": True}
    found = await client().post("/v1/completions", json=streaming)
    assert found.text == "data: {}\n\ndata: [DONE]\n\n"
    found = await client().post("/v1/completions", json={**streaming, "max_tokens": 2})
    assert found.text.startswith("data: {}\n\nevent: error\n")
    assert "[DONE]" not in found.text


# --- under Ray ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RayLlmProcess]:
    env = {**haproxy_env(), "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"}
    config = llm_config("stories", str(REPOSITORY / "models" / "stories"))
    with RayLlmProcess(config, env=env) as process:
        yield process


@pytest.mark.survey  # a server for one test; the routes are tested above, without Ray
@pytest.mark.timeout(900)
def test_direct_streaming(server: RayLlmProcess) -> None:
    plain, none = answer(server.url, {**OPTIONS, "prompt": PROMPTS[0]})
    assert none is None
    for body in (COMPLETIONS[0], CHATS[1]):
        whole = answer(server.url, body)
        assert whole == streamed(server.url, body)
        assert whole[0] != plain
        assert whole[1]["guided_tokens"] > 0
    body = {**OPTIONS, "messages": CHATS[0]["messages"], "guidance_scal": 3.0}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert found.status_code == 400
    assert "Did you mean guidance_scale?" in found.json()["error"]["message"]
