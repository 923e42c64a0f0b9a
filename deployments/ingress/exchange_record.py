"""What is told of one HTTP request: a line in the log, the metrics, and its span."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import Scope

from deployments.admission.tenants import Tenant
from deployments.ingress.metrics import UNKNOWN
from deployments.ingress.policy import Policy
from deployments.observability import spans
from deployments.observability.spans import Span

MAX_LOGGED_CHARS = 500
MAX_LOGGED_PATH_CHARS = 200

logger = logging.getLogger("ray.serve")


class ExchangeRecord:
    """What is known of a request and its answer while they pass, and told at their end.

    path: without the root path of the application. now: a clock, in seconds.
    """

    def __init__(
        self, scope: Scope, path: str, request_id: str, policy: Policy, now: Callable[[], float]
    ) -> None:
        self._scope, self._path, self._request_id = scope, path, request_id
        self._policy, self._now = policy, now
        self.tenant: Tenant | None = None
        self.status: int | None = None  # of the answer; None until it begins
        self.bytes_in = self.bytes_out = 0
        self.span: Span | None = None  # None if it is not sent anywhere
        self.not_sampled: dict[str, str] = {}  # headers that say so to other processes
        self._began_s = now()
        self._first_byte_s: float | None = None  # since it began
        self._head = b""  # the first bytes of the body, for log_prompts

    def keep_head(self, body: bytes) -> None:
        """Keep what of a part of the request's body `log_prompts` shows."""
        if self._policy.log_prompts:
            self._head = (self._head + body)[: 4 * MAX_LOGGED_CHARS]

    def begins(self, status: int) -> None:
        """Note the answer's status, and when it begins."""
        self.status = status
        self._first_byte_s = self._now() - self._began_s

    def begin_span(self, headers: Headers) -> None:
        """Begin the request's span, unless nothing is traced.

        The client may ask for a trace by its `traceparent`, so this comes after its key is checked.
        A request that is not sampled has no span here, but other processes learn that it is not.
        """
        tracing = spans.current()
        if tracing is None:
            return
        method, metrics = self._scope["method"], self._policy.metrics
        name = UNKNOWN if metrics is None else metrics.path_of(self._path)
        about = {
            "http.request.method": method,
            "url.path": quoted(self._path),
            "request_id": self._request_id,
        }
        span = tracing.under(headers, f"{method} {name}", about)
        if span.is_recording:
            self.span = span
        else:
            self.not_sampled = span.headers

    def fail(self, error: Exception) -> None:
        if self.span is not None:
            self.span.fail(error)

    def stalled(self, error: Exception) -> None:
        """Tell that the client does not read its answer."""
        self.fail(error)
        told = {"request_id": self._request_id}
        logger.warning("request_id=%s %s", self._request_id, error, extra=told)

    def end(self, refused: str | None) -> None:
        """Tell all. refused: the reason of an OverloadedError."""
        end_s = self._now() - self._began_s
        self._log(end_s)
        if self._policy.metrics is not None:
            self._policy.metrics.answered(
                self._path, self.status, self._tenant_name, self._first_byte_s, end_s, refused
            )
        self._end_span()

    def _end_span(self) -> None:
        if self.span is None:
            return
        tenant = self._tenant_name or "-"
        self.span.set({"tenant": tenant, "bytes_in": self.bytes_in, "bytes_out": self.bytes_out})
        if self.status is None:
            self.span.set({"client_left": True})
        else:
            self.span.set({"http.response.status_code": self.status})
            if self.status >= 500:
                self.span.fail(str(self.status))
        if self._first_byte_s is not None:
            self.span.set({"first_byte_ms": 1000 * self._first_byte_s})
        self.span.end()

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
            "status": self.status,
            "first_byte_ms": _ms(self._first_byte_s),
            "end_ms": _ms(end_s),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }
        words = (f"{name}={'-' if value is None else value}" for name, value in fields.items())
        logger.info(" ".join(words), extra=fields)
        if self._head:
            text = self._head.decode("utf-8", "replace")[:MAX_LOGGED_CHARS]
            told = {"request_id": self._request_id, "body": text}
            logger.info("request_id=%s log_prompts: body begins %r", *told.values(), extra=told)

    @property
    def _tenant_name(self) -> str | None:
        return self.tenant.name if self.tenant is not None else None


def quoted(path: str) -> str:
    """A path as it is told to logs and traces."""
    return quote(path, errors="replace")[:MAX_LOGGED_PATH_CHARS]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
