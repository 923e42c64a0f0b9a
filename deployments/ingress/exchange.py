"""One HTTP request and its answer, as they pass through the guard."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cfg_core.errors import BodyTimeoutError, BodyTooLargeError, CfgServeError, EngineError
from deployments.admission.tenants import ANONYMOUS, Tenant
from deployments.http.errors import http_error
from deployments.http.open_requests import OpenRequest
from deployments.ingress.metrics import UNKNOWN
from deployments.ingress.policy import Policy
from deployments.ingress.serve_queue import queue_behind, room
from deployments.ingress.sites import is_preflight
from deployments.messages import INTERNAL
from deployments.observability import spans
from deployments.observability.spans import TRACE_HEADERS, Span

OPEN_PATHS = ("/health", "/ready")
"""Polled by load balancers, without an API key, and however many requests are in progress."""

METRICS = "/metrics"
"""Scraped however many requests are in progress, because the scrapes tell about overload."""

PAGES = ("/", "/playground", "/docs", "/openapi.json")
PAGE_FILES = ("/playground/", "/docs/")
"""Pages, and beginnings of the paths of their files: a browser sends no API key with them."""
READING = ("GET", "HEAD")

DRAINED_BYTES, DRAIN_S = 64 * 2**20, 10.0
"""How much of a body that is too large is read and dropped, in bytes and in seconds.

Without this, the client would get a connection reset before it gets the answer.
"""

REFUSED, SPAN = "refused", "span"
"""Keys of the scope's state: the reason of an OverloadedError, and the span if there is one."""

REQUEST_ID = b"x-request-id"

CSP, NOTHING_MORE = b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"
"""What a browser may do with an answer that is no page: show it, but not in another page's frame.

Pages have a policy of their own.
"""

MAX_LOGGED_CHARS = 500
MAX_LOGGED_PATH_CHARS = 200

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OWN_HEADERS = (REQUEST_ID, b"x-content-type-options", b"x-frame-options")

logger = logging.getLogger("ray.serve")

RawHeaders = list[tuple[bytes, bytes]]


class ClientStalledError(Exception):
    """The client does not read its answer."""


class Exchange:
    """One HTTP request and its answer, as they pass through Guard.

    `behind_serve` and `now` are Guard's arguments.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        policy: Policy,
        behind_serve: bool,
        now: Callable[[], float],
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._policy = policy
        self._now = now
        self._path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        self._headers = Headers(raw=list(scope["headers"]))
        given = self._headers.get("x-request-id", "")
        is_well_formed = _REQUEST_ID.fullmatch(given) is not None
        self._request_id = given if is_well_formed else uuid.uuid4().hex
        self._tells_id = not (behind_serve and is_well_formed)
        self._tenant: Tenant | None = None
        self._client = scope["client"][0] if scope.get("client") else "unknown"
        self._open_request: OpenRequest | None = None
        self._body_is_whole = False
        self._is_shared = False  # whether a web page of another origin may read the answer
        self._body_deadline = 0.0  # by the event loop's clock
        self._queue = queue_behind(send)
        self._status: int | None = None  # of the answer; None until it begins
        self._state: dict[str, Any] = {}  # of the scope inside
        self._began_s = now()
        self._first_byte_s: float | None = None  # since it began
        self._bytes_in = self._bytes_out = 0
        self._head = b""  # the first bytes of the body, for log_prompts
        self._span: Span | None = None  # None if it is not sent anywhere
        self._not_sampled: dict[str, str] = {}  # headers that say so to other processes

    async def run(self, app: ASGIApp) -> None:
        """Pass the request to `app`, or answer it with an error.

        An error after the answer has begun is raised, so that the server ends the connection.
        """
        try:
            self._check_site()
            if self._is_preflight:
                await self._answer_preflight()
                return
            self._tenant = self._authenticate()
            self._begin_span()
            self._come_in()
            self._check_declared_size()
            await app(self._scope_inside(), self._receive_counted, self._send_marked)
        except ClientDisconnect:
            pass  # it left while it sent its body: `_log` has no status then
        except ClientStalledError as error:
            self._failed(error)
            told = {"request_id": self._request_id}
            logger.warning("request_id=%s %s", self._request_id, error, extra=told)
        except CfgServeError as error:
            if self._status is not None:
                self._failed(error)
                raise
            await self._drain(error)
            await self._answer(error)
        except Exception as error:
            self._failed(error)
            if self._status is None:
                await self._answer(EngineError(INTERNAL))
            raise
        finally:
            if self._open_request is not None:
                self._open_request.end()
            end_s = self._now() - self._began_s
            self._log(end_s)
            self._count(end_s)
            self._end_span()

    # --- the request ------------------------------------------------------------------------------

    def _check_site(self) -> None:
        """Check by which name the server is called, and which web page calls it; RequestError.

        Load balancers call OPEN_PATHS by any name, and their answers tell nothing.
        """
        if self._path not in OPEN_PATHS:
            self._policy.sites.check_host(self._headers)
            self._is_shared = self._policy.sites.allows(self._headers)

    @property
    def _is_preflight(self) -> bool:
        return (
            self._is_shared and self._scope["method"] == "OPTIONS" and is_preflight(self._headers)
        )

    async def _answer_preflight(self) -> None:
        response = self._policy.sites.cors.preflight_response(self._headers)
        await response(self._scope, self._receive, self._send_marked)

    @property
    def _needs_no_key(self) -> bool:
        is_page = self._path in PAGES or self._path.startswith(PAGE_FILES)
        return self._path in OPEN_PATHS or (is_page and self._scope["method"] in READING)

    def _authenticate(self) -> Tenant:
        if self._needs_no_key:
            return ANONYMOUS
        return self._policy.gate.authenticate(
            self._headers.get("authorization"), self._headers.get("x-api-key")
        )

    def _come_in(self) -> None:
        """Set the client and the body's deadline, and count the request as in progress.

        Raises OverloadedError if this client, or all together, have too many requests here.
        """
        policy = self._policy
        limits = policy.open_requests.args
        self._body_deadline = asyncio.get_running_loop().time() + limits.body_timeout_s
        if self._tenant is not None and self._tenant is not ANONYMOUS:
            self._client = self._tenant.name
        if self._path not in (*OPEN_PATHS, METRICS):
            self._open_request = policy.open_requests.begin(self._client)

    def _check_declared_size(self) -> None:
        """Check Content-Length. If it is no number, the size is checked as the body arrives."""
        declared = self._headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 20:
            self._check_size(int(declared))

    def _check_size(self, num_bytes: int) -> None:
        limit = self._policy.max_body_bytes
        if num_bytes > limit:
            raise BodyTooLargeError(
                f"The body is larger than {limit} bytes: send less in one request."
            )

    def _scope_inside(self) -> Scope:
        headers = _without(self._scope["headers"], (REQUEST_ID,))
        headers.append((REQUEST_ID, self._request_id.encode()))
        if self._not_sampled:
            headers = _without(headers, tuple(name.encode() for name in TRACE_HEADERS))
            headers += [(name.encode(), told.encode()) for name, told in self._not_sampled.items()]
        ours = {"request_id": self._request_id, "tenant": self._tenant, "client": self._client}
        self._state = {**self._scope.get("state", {}), **ours}
        if self._span is not None:
            self._state[SPAN] = self._span
        return {**self._scope, "headers": headers, "state": self._state}

    async def _receive_counted(self) -> Message:
        """Receive a message, and count the bytes of its body.

        Raises BodyTooLargeError, BodyTimeoutError or OverloadedError, in the route that reads it.
        """
        message = await self._receive_in_time()
        if message["type"] == "http.request":
            body = message.get("body", b"")
            self._body_is_whole = not message.get("more_body", False)
            self._bytes_in += len(body)
            self._check_size(self._bytes_in)
            if self._open_request is not None:
                self._open_request.hold(len(body))
            if self._policy.log_prompts:
                self._head = (self._head + body)[: 4 * MAX_LOGGED_CHARS]
        return message

    async def _receive_in_time(self) -> Message:
        """Receive a message, before the body's deadline if the body is not complete.

        The only message after the body is the client's disconnect, which has no deadline.
        """
        if self._body_is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._body_deadline):
                return await self._receive()
        except TimeoutError:
            limit = self._policy.open_requests.args.body_timeout_s
            raise BodyTimeoutError(
                f"The body did not arrive within {limit:g} s: send it faster."
            ) from None

    async def _drain(self, error: CfgServeError) -> None:
        """Read and drop the rest of a body that is too large.

        A client that waits for `100 Continue` has not sent its body, so nothing is read from it.
        """
        waits = self._headers.get("expect", "").lower() == "100-continue"
        if waits or not isinstance(error, BodyTooLargeError):
            return
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not self._body_is_whole and num_bytes < DRAINED_BYTES:
                    message = await self._receive()
                    self._body_is_whole = not message.get("more_body", False)
                    num_bytes += len(message.get("body", b""))

    # --- the answer -------------------------------------------------------------------------------

    async def _send_marked(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._first_byte_s = self._now() - self._began_s
            message = {**message, "headers": self._answer_headers(message.get("headers", ()))}
        elif message["type"] == "http.response.body":
            self._bytes_out += len(message.get("body", b""))
        limit_s = self._policy.open_requests.args.stall_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                if self._is_shared:
                    await self._policy.sites.cors.send(message, self._send, self._headers)
                else:
                    await self._send(message)
                await room(self._queue)
        except TimeoutError:
            raise ClientStalledError(
                f"The client has not read its answer for {limit_s:g} s: the request is aborted."
            ) from None

    def _answer_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
        answer = _without(headers, _OWN_HEADERS)
        answer.append((b"x-content-type-options", b"nosniff"))
        if self._scope["method"] in ("GET", "HEAD"):
            answer.append((b"x-frame-options", b"DENY"))
            if not any(name.lower() == CSP for name, _ in answer):
                answer.append((CSP, NOTHING_MORE))
        if self._tells_id:
            answer.append((REQUEST_ID, self._request_id.encode()))
        return answer

    async def _answer(self, error: CfgServeError) -> None:
        self._state[REFUSED] = getattr(error, "reason", None)
        answer = http_error(error, self._path)
        response = JSONResponse(answer.body, answer.status, answer.headers)
        await response(self._scope, self._receive, self._send_marked)

    # --- the span ---------------------------------------------------------------------------------

    def _begin_span(self) -> None:
        """Begin the request's span, unless nothing is traced, or for pages and what is polled.

        The client may ask for a trace by its `traceparent`, so this comes after its key is checked.
        A request that is not sampled has no span here, but other processes learn that it is not.
        """
        tracing = spans.current()
        if tracing is None or self._path == METRICS or self._needs_no_key:
            return
        method, metrics = self._scope["method"], self._policy.metrics
        name = UNKNOWN if metrics is None else metrics.path_of(self._path)
        about = {
            "http.request.method": method,
            "url.path": quoted(self._path),
            "request_id": self._request_id,
        }
        span = tracing.under(self._headers, f"{method} {name}", about)
        if span.is_recording:
            self._span = span
        else:
            self._not_sampled = span.headers

    def _failed(self, error: Exception) -> None:
        if self._span is not None:
            self._span.fail(error)

    def _end_span(self) -> None:
        if self._span is None:
            return
        tenant = self._tenant_name or "-"
        self._span.set({"tenant": tenant, "bytes_in": self._bytes_in, "bytes_out": self._bytes_out})
        if self._status is None:
            self._span.set({"client_left": True})
        else:
            self._span.set({"http.response.status_code": self._status})
            if self._status >= 500:
                self._span.fail(str(self._status))
        if self._first_byte_s is not None:
            self._span.set({"first_byte_ms": 1000 * self._first_byte_s})
        self._span.end()

    # --- the log ----------------------------------------------------------------------------------

    def _log(self, end_s: float) -> None:
        """Write one line to the log, and a second one with the start of the body for log_prompts.

        The path is quoted, and a request id is the client's only if it is well-formed, so that a
        client cannot forge a line. In JSON, the same values are fields.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = {
            "request_id": self._request_id,
            "tenant": self._tenant_name,
            "method": self._scope["method"],
            "path": quoted(self._scope["path"]),
            "status": self._status,
            "first_byte_ms": _ms(self._first_byte_s),
            "end_ms": _ms(end_s),
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }
        words = (f"{name}={'-' if value is None else value}" for name, value in fields.items())
        logger.info(" ".join(words), extra=fields)
        if self._head:
            text = self._head.decode("utf-8", "replace")[:MAX_LOGGED_CHARS]
            told = {"request_id": self._request_id, "body": text}
            logger.info("request_id=%s log_prompts: body begins %r", *told.values(), extra=told)

    def _count(self, end_s: float) -> None:
        if self._policy.metrics is not None:
            refused = self._state.get(REFUSED)
            self._policy.metrics.answered(
                self._path, self._status, self._tenant_name, self._first_byte_s, end_s, refused
            )

    @property
    def _tenant_name(self) -> str | None:
        return self._tenant.name if self._tenant is not None else None


def quoted(path: str) -> str:
    """A path as it is told to logs and traces."""
    return quote(path, errors="replace")[:MAX_LOGGED_PATH_CHARS]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _without(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> RawHeaders:
    return [(name, value) for name, value in headers if name.lower() not in names]
