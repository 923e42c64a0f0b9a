"""Middleware of Serve's own HTTP proxy: bounds for each address, and errors in OpenAI's format.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy.middleware:middlewares` in
configs/serve.env installs it. The proxy belongs to the cluster and not to an application, so its
bounds are in the environment and not in a YAML file:

    CFG_SERVE_MAX_REQUESTS=4096                 requests in one proxy at the same time: of all, and
    CFG_SERVE_MAX_REQUESTS_PER_ADDRESS=1024     of one address; beyond: 429, without an ingress
    CFG_SERVE_BODY_TIMEOUT_S=30                 for a body, or HELD_BYTES of it, to arrive; else 408
    CFG_SERVE_HEAD_TIMEOUT_S=10                 for the head of a request to arrive; else 408
    CFG_SERVE_MAX_HEAD_BYTES=65536              of a head and of trailers (heads.py); beyond: 431
    CFG_SERVE_MAX_HEAD_LINES=256                header lines and lines of trailers; beyond: 431

A request is passed on when its body is complete, or when HELD_BYTES of it have arrived. So a client
that does not finish its body costs one connection, and nothing behind the proxy.

An address is the peer's, or what X-Forwarded-For says if FORWARDED_ALLOW_IPS names the peer. This
variable is uvicorn's. Its default is the loopback address, so that every local client could claim
any address. Here the default is nobody. Guard (ingress/guard.py) has bounds of its own, which also
hold behind HAProxy. With HAProxy, this module runs in the ingress replicas. Imports neither Ray nor
vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cfg_core.errors import BodyTimeoutError, CfgServeError, OverloadedError, RequestError
from deployments import serve_patches
from deployments.config.limits import LimitsArgs
from deployments.http.open_requests import OpenRequest, OpenRequests
from deployments.http.recent import Recent
from deployments.proxy.error_answers import ErrorRewriter, answer_of
from deployments.proxy.http_1_0 import end_by_closing
from deployments.proxy.starts import Start, Starts

logger = logging.getLogger("ray.serve")

SHARED_PATHS = ("/health", "/ready")
"""Paths that monitors ask, and whose answer is the same for all of them.

The ingress is asked once at a time, and its answer goes to all. While it is busy, an earlier answer
is sent (http/recent.py).
"""

PROBE_PATH = "/health"
"""What the ingress is asked for to learn whether it has begun all earlier requests (starts.py)."""

HELD_BYTES = 2**16
"""Bytes of a body that are collected here before its request is passed on.

The rest of a longer body is passed on as it arrives. Guard (ingress/guard.py) has a deadline and
bounds for it.
"""


READ_AS_BYTES = frozenset({b"authorization", b"cookie", b"referer", b"user-agent", b"x-api-key"})
"""Headers that may hold any bytes.

Browsers send such cookies, and only our own code reads these headers: as latin-1, where every byte
is a character.
"""


def middlewares() -> list[Middleware]:
    """The middlewares of the proxy.

    Serve calls this in the process of each server, before it configures uvicorn. So the patches of
    uvicorn are applied here, too.
    """
    serve_patches.apply(serve_patches.SERVER)
    os.environ.setdefault("FORWARDED_ALLOW_IPS", "")
    most = int(os.environ.get("CFG_SERVE_MAX_REQUESTS", 4096))
    of_one = int(os.environ.get("CFG_SERVE_MAX_REQUESTS_PER_ADDRESS", 1024))
    timeout_s = float(os.environ.get("CFG_SERVE_BODY_TIMEOUT_S", 30))
    limits = LimitsArgs(max_requests=most, max_requests_per_client=of_one, body_timeout_s=timeout_s)
    return [Middleware(ConnectionLimits, limits=limits)]


class ConnectionLimits:
    """ASGI middleware of Serve's proxy, with the bounds of this module."""

    def __init__(self, app: ASGIApp, limits: LimitsArgs) -> None:
        self._app = app
        self._requests = OpenRequests(limits)
        self._starts = Starts()
        self._shared = {path: SharedAnswer(app) for path in SHARED_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._pass_on(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] in self._shared:
            await self._shared[scope["path"]].tell(scope, send)
        else:
            await self._let_in(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a websocket, for other applications of the cluster."""
        try:
            check_text(scope.get("headers", ()))
        except RequestError as error:
            await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
        else:
            await self._app(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope.get("client") else "unknown"
        start: Start | None = None

        async def send_and_end_start(message: Message) -> None:
            if start is not None:
                start.end()
            await send(message)

        rewriter = ErrorRewriter(send_and_end_start, end_by_closing(scope, send))
        try:
            open_request: OpenRequest = self._requests.begin(address)
        except OverloadedError as error:
            await tell(error, rewriter)
            return
        try:
            check_text(scope["headers"])
            body = await self._beginning(scope, receive)
            if body is not None:
                start = await self._starts.begin(address, lambda: self._probe(scope))
                await self._app(scope, body, rewriter)
                await rewriter.complete()
        except RequestError as error:
            await tell(error, rewriter)
        except Exception:
            await rewriter.complete()  # with an error in OpenAI's format, not uvicorn's plain text
            raise
        finally:
            open_request.end()
            if start is not None:
                start.end()

    async def _probe(self, scope: Scope) -> None:
        await ask_as_nobody(self._app, {**scope, "method": "GET", "path": PROBE_PATH})

    async def _beginning(self, scope: Scope, receive: Receive) -> Receive | None:
        """A `receive` for the application, once the body or HELD_BYTES of it have arrived.

        None if the client has left. Raises BodyTimeoutError.
        """
        if any(name == b"expect" for name, _ in scope["headers"]):
            return receive  # the client waits: Guard decides whether it should send its body
        limit_s = self._requests.args.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                messages = await _first(HELD_BYTES, receive)
        except TimeoutError:
            raise BodyTimeoutError(
                f"The body did not arrive within {limit_s:g} s: send it faster."
            ) from None
        if messages[-1]["type"] == "http.disconnect":
            return None

        async def replay() -> Message:
            return messages.popleft() if messages else await receive()

        return replay


def check_text(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise RequestError that names a header which is not UTF-8.

    Serve decodes several headers as UTF-8 (the ids of the request, the session and the model, the
    trace, the timeout). If one cannot be decoded, its proxy fails with a bare 500.
    """
    for name, value in headers:
        if name not in READ_AS_BYTES:
            try:
                value.decode()
            except UnicodeDecodeError:
                told = name.decode("ascii", "replace")[:100]
                raise RequestError(
                    f"The header {told} is not UTF-8: send it as UTF-8 text.", told
                ) from None


class SharedAnswer:
    """The answer to a GET that is the same for all clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._scope: Scope = {}
        self._messages = Recent(self._ask)

    async def tell(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        for message in await self._messages.value():
            await send(message)

    async def _ask(self) -> Sequence[Message]:
        return await ask_as_nobody(self._app, self._scope)


async def ask_as_nobody(app: ASGIApp, scope: Scope) -> Sequence[Message]:
    """Send a GET of the path of `scope` to `app`, with nothing else of its client."""
    messages: list[Message] = []

    async def keep(message: Message) -> None:
        messages.append(message)

    rewriter = ErrorRewriter(keep)
    try:
        await app(_of_nobody(scope), _nothing_more(), rewriter)
    except Exception:
        logger.exception("%s could not be answered", scope["path"])
    await rewriter.complete()
    return messages


def _of_nobody(scope: Scope) -> Scope:
    """The scope of a GET of the same path, with nothing that its client chose."""
    path = scope["path"]
    clean = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    return {**scope, **clean, "client": None, "state": {}}


async def _first(num_bytes: int, receive: Receive) -> deque[Message]:
    """The messages until the body is complete, has `num_bytes` bytes, or the client has left."""
    messages: deque[Message] = deque()
    while num_bytes > 0:
        message = await receive()
        messages.append(message)
        num_bytes -= len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return messages


def _nothing_more() -> Receive:
    """A `receive` with an empty body, from a client that never leaves: the answer is for all."""
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
