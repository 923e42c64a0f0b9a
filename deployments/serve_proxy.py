"""What stands in front of Serve's own HTTP proxy: bounds for each address, and answers in the shape that clients know.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.serve_proxy:middlewares` in configs/serve.env puts it there. The
proxy belongs to the cluster, not to an application, so its bounds are in the environment, not in a YAML:

    CFG_SERVE_MAX_REQUESTS=4096                 at once in one proxy; beyond: 429, which the ingress
    CFG_SERVE_MAX_REQUESTS_PER_ADDRESS=1024     does not notice

An address is the peer's, or what X-Forwarded-For says if uvicorn trusts the peer (FORWARDED_ALLOW_IPS). Nothing here
is needed for correctness: without it, and behind HAProxy, http_guard.py keeps its own bounds. No Ray, no vLLM here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cfg_core.errors import CfgServeError, OverloadedError
from deployments.http_1_0 import end_by_closing
from deployments.limits import Crowd, LimitsArgs, Stay
from deployments.recent import Recent
from deployments.serve_answers import Answered, answer_of

SHARED_PATHS = ("/health", "/ready")
"""Asked by everybody who watches, and answered alike: one question at a time, and its answer for all."""


def middlewares() -> list[Middleware]:
    """Called by Serve in each proxy's process."""
    most = int(os.environ.get("CFG_SERVE_MAX_REQUESTS", 4096))
    of_one = int(os.environ.get("CFG_SERVE_MAX_REQUESTS_PER_ADDRESS", 1024))
    return [Middleware(Porter, limits=LimitsArgs(max_requests=most, max_requests_per_client=of_one))]


class Porter:
    """ASGI middleware of Serve's proxy."""

    def __init__(self, app: ASGIApp, limits: LimitsArgs) -> None:
        self._app = app
        self._crowd = Crowd(limits)
        self._shared = {path: SharedAnswer(app) for path in SHARED_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] in self._shared:
            await self._shared[scope["path"]].tell(scope, send)
        else:
            await self._let_in(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = Answered(send, end_by_closing(scope, send))
        try:
            stay: Stay = self._crowd.stay(scope["client"][0] if scope.get("client") else "unknown")
        except OverloadedError as error:
            await tell(error, answered)
            return
        try:
            await self._app(scope, receive, answered)
        finally:
            stay.end()
        await answered.complete()


class SharedAnswer:
    """The answer to a GET that does not depend on who asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._scope: Scope = {}
        self._messages = Recent(self._ask, old_s=0.0)

    async def tell(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        for message in await self._messages.value():
            await send(message)

    async def _ask(self) -> Sequence[Message]:
        """Whoever asked last asks for all."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        answered = Answered(keep)
        await self._app(self._scope, _nothing_more(), answered)
        await answered.complete()
        return messages


def _nothing_more() -> Receive:
    """An empty body, whose client stays: those who ask may leave, the answer is for all."""
    told = False

    async def receive() -> Message:
        nonlocal told
        if told:
            await asyncio.Event().wait()
        told = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


async def tell(error: CfgServeError, send: Send) -> None:
    for message in answer_of(error):
        await send(message)
