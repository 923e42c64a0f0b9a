"""Requests that Ray sends past its ingress ("direct streaming"), to vLLM's own routes.

vLLM's routes would ignore the fields of guidance. This middleware of vLLM's application answers
requests that have some, on all routes that generate text, and lets the others through.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cfg_core.errors import CfgServeError, RequestError
from deployments.http.errors import http_error
from deployments.http.text_answers import error_event, json_answer
from deployments.messages import Chunk, GenerateCall, Whole
from deployments.ray_llm.calls import read_call
from deployments.requests.body import decode_body
from deployments.requests.endpoints import Endpoint

PATHS: dict[str, Endpoint] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "batch",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/generative_scoring": "scoring",
}
"""vLLM's routes that generate text."""

Items = AsyncGenerator[Chunk | Whole, None]


class GuidedRoutes:
    """ASGI middleware that answers guided requests.

    generate: serves one call, as VllmServer does.
    """

    def __init__(self, app: ASGIApp, generate: Callable[[GenerateCall], Items]) -> None:
        self._app = app
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = PATHS.get(scope.get("path", "").rstrip("/"))
        if scope["type"] != "http" or scope["method"] != "POST" or endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        raw = await request.body()
        answer = await self._answer(endpoint, raw, request)
        if answer is None:
            await self._app(scope, _again(raw, receive), send)
        else:
            await answer(scope, receive, send)

    async def _answer(self, endpoint: Endpoint, raw: bytes, request: Request) -> Response | None:
        """The answer to a request with guidance; None for one without, or without JSON."""
        try:
            body = decode_body(raw)
        except RequestError:
            return None  # vLLM refuses it
        try:
            call = read_call(endpoint, body, request.headers)
            return None if call is None else await _begun(self._generate(call))
        except CfgServeError as error:
            told = http_error(error, request.url.path)
            return JSONResponse(told.body, told.status, told.headers)


async def _begun(items: Items) -> Response:
    """The answer that these items make. Raises CfgServeError if the first one is refused."""
    first = await anext(items)
    if isinstance(first, Whole):
        async with aclosing(items):
            return json_answer(first.text + "".join([item.text async for item in items]))
    return StreamingResponse(_events(first, items), media_type="text/event-stream")


async def _events(first: Chunk | Whole, items: Items) -> AsyncIterator[str]:
    async with aclosing(items):
        yield first.text
        try:
            async for item in items:
                yield item.text
        except CfgServeError as error:
            yield error_event(error)


def _again(raw: bytes, receive: Receive) -> Receive:
    """A `receive` that brings a body which has been read, and then what `receive` brings."""
    bodies: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def again() -> Message:
        return bodies.pop() if bodies else await receive()

    return again
