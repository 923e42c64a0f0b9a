"""One HTTP request and its answer, as they pass through the guard."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cfg_core.errors import BodyTimeoutError, BodyTooLargeError, CfgServeError, EngineError
from deployments.admission.tenants import ANONYMOUS, Tenant
from deployments.http.errors import http_error
from deployments.http.open_requests import OpenRequest
from deployments.ingress.exchange_record import ExchangeRecord
from deployments.ingress.policy import Policy
from deployments.ingress.serve_queue import queue_behind, room
from deployments.ingress.sites import is_preflight
from deployments.messages import INTERNAL
from deployments.observability.spans import TRACE_HEADERS

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

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OWN_HEADERS = (REQUEST_ID, b"x-content-type-options", b"x-frame-options")

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
        self._state: dict[str, Any] = {}  # of the scope inside
        self._record = ExchangeRecord(scope, self._path, self._request_id, policy, now)

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
            self._record.tenant = self._tenant
            if not self._needs_no_key and self._path != METRICS:
                self._record.begin_span(self._headers)
            self._come_in()
            self._check_declared_size()
            await app(self._scope_inside(), self._receive_counted, self._send_marked)
        except ClientDisconnect:
            pass  # it left while it sent its body: the record has no status then
        except ClientStalledError as error:
            self._record.stalled(error)
        except CfgServeError as error:
            if self._record.status is not None:
                self._record.fail(error)
                raise
            await self._drain(error)
            await self._answer(error)
        except Exception as error:
            self._record.fail(error)
            if self._record.status is None:
                await self._answer(EngineError(INTERNAL))
            raise
        finally:
            if self._open_request is not None:
                self._open_request.end()
            self._record.end(self._state.get(REFUSED))

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
        if not_sampled := self._record.not_sampled:
            headers = _without(headers, tuple(name.encode() for name in TRACE_HEADERS))
            headers += [(name.encode(), told.encode()) for name, told in not_sampled.items()]
        ours = {"request_id": self._request_id, "tenant": self._tenant, "client": self._client}
        self._state = {**self._scope.get("state", {}), **ours}
        if self._record.span is not None:
            self._state[SPAN] = self._record.span
        return {**self._scope, "headers": headers, "state": self._state}

    async def _receive_counted(self) -> Message:
        """Receive a message, and count the bytes of its body.

        Raises BodyTooLargeError, BodyTimeoutError or OverloadedError, in the route that reads it.
        """
        message = await self._receive_in_time()
        if message["type"] == "http.request":
            body = message.get("body", b"")
            self._body_is_whole = not message.get("more_body", False)
            self._record.bytes_in += len(body)
            self._check_size(self._record.bytes_in)
            if self._open_request is not None:
                self._open_request.hold(len(body))
            self._record.keep_head(body)
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
            self._record.begins(message["status"])
            message = {**message, "headers": self._answer_headers(message.get("headers", ()))}
        elif message["type"] == "http.response.body":
            self._record.bytes_out += len(message.get("body", b""))
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


def _without(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> RawHeaders:
    return [(name, value) for name, value in headers if name.lower() not in names]
