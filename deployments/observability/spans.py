"""Spans of requests: begun here, and sent to a collector by a thread of OpenTelemetry's.

`current()` is None unless the YAML has `tracing.otlp_traces_endpoint`. Then opentelemetry is not
imported, and a request costs one check for each span that it would have. Parents are always passed
explicitly, in this process as a Span and between processes as the header `traceparent`.

Spans hold numbers, names and ids, never a text of a prompt or an answer. Errors are told by their
class, because a message may quote the request. Of a caller's headers only `traceparent` counts:
`tracestate` is text of any kind, and is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from deployments.config.tracing import TracingArgs

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind

Attributes: TypeAlias = Mapping[str, str | bool | int | float]

SERVICE = "cfg-serve"
SEND_EVERY_MS = 1000
PREFIX = "cfg_serve."
"""Of the names of our own attributes."""

CLIENT, INTERNAL, SERVER = "CLIENT", "INTERNAL", "SERVER"

TRACEPARENT = "traceparent"
TRACE_HEADERS = (TRACEPARENT, "tracestate")

LEFT = ("CancelledError", "GeneratorExit", "TaskCancelledError")
"""Exceptions that end the work for a client who left, by name: one of them is Ray's."""


class Span:
    """One span, which must be ended; ending it twice does nothing."""

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        self._tracing, self._span = tracing, span
        self._has_failed = False

    @property
    def is_recording(self) -> bool:
        """Whether it will be sent: it is sampled, and has not ended."""
        return self._span.is_recording()

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        kind: str = INTERNAL,
        start_s: float | None = None,
    ) -> Span:
        """Begin a span below this one; start_s: by time.monotonic, default: now."""
        from opentelemetry.trace import set_span_in_context

        return self._tracing.begin(name, attributes, kind, set_span_in_context(self._span), start_s)

    def set(self, attributes: Attributes) -> None:
        """Add attributes; names without a dot get PREFIX."""
        self._span.set_attributes(_named(attributes))

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed; the first failure counts.

        A client who leaves is no failure, so the span is then marked `client_left`.
        """
        from opentelemetry.trace import Status, StatusCode

        kind = error if isinstance(error, str) else type(error).__name__
        if kind in LEFT:
            self.set({"client_left": True})
            return
        if self._has_failed:
            return
        self._has_failed = True
        self._span.set_status(Status(StatusCode.ERROR, kind))
        self._span.set_attribute("error.type", kind)

    def end(self, end_s: float | None = None) -> None:
        """End the span; end_s: by time.monotonic, default: now."""
        if self._span.is_recording():
            self._span.end(None if end_s is None else unix_ns(end_s))

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the span, and mark it by the error, if there is one."""
        if error is not None:
            self.fail(error)
        self.end()

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers by which another process begins spans below this one."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, set_span_in_context(self._span))
        return headers


class Tracing:
    """What makes and sends the spans of one process.

    about: attributes of this process, such as its name.
    """

    def __init__(self, args: TracingArgs, about: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        told = {f"{PREFIX}{name}": value for name, value in about.items()}
        if SERVICE_NAME not in OTELResourceDetector().detect().attributes:  # of the environment
            told[SERVICE_NAME] = SERVICE
        self._provider = TracerProvider(
            resource=Resource.create(told),
            sampler=ParentBasedTraceIdRatio(args.sampling_ratio),
            shutdown_on_exit=False,  # it would wait for a collector that does not answer
        )
        sender = BatchSpanProcessor(_exporter(args), schedule_delay_millis=SEND_EVERY_MS)
        self._provider.add_span_processor(sender)
        self._tracer = self._provider.get_tracer("cfg_serve")

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        kind: str = INTERNAL,
        parent: Context | None = None,
        start_s: float | None = None,
    ) -> Span:
        """Begin a span; without a parent it is the first of a trace."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        kinds: Mapping[str, SpanKind] = SpanKind.__members__
        span = self._tracer.start_span(
            name,
            Context() if parent is None else parent,
            kinds[kind],
            _named(attributes or {}),
            start_time=None if start_s is None else unix_ns(start_s),
        )
        return Span(self, span)

    def under(self, headers: Mapping[str, str], name: str, attributes: Attributes) -> Span:
        """Begin a span below the one that these headers name, and sampled if that one is.

        Without one, it is the first of a trace.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = {TRACEPARENT: headers.get(TRACEPARENT, "")}
        parent = TraceContextTextMapPropagator().extract(above, Context())
        return self.begin(name, attributes, SERVER, parent)

    def flush(self, limit_s: float) -> None:
        """Send what is not sent yet; blocks for so many seconds at most.

        OpenTelemetry's own limit does not end a request that a collector leaves unanswered. So a
        thread sends, which does not keep the process alive.
        """
        sender = threading.Thread(target=self._provider.force_flush, daemon=True)
        sender.start()
        sender.join(limit_s)


def _exporter(args: TracingArgs) -> SpanExporter:
    exporter: SpanExporter
    if args.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=args.otlp_traces_endpoint)
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        exporter = trace_exporter.OTLPSpanExporter(endpoint=args.otlp_traces_endpoint)
    return exporter


def _named(attributes: Attributes) -> dict[str, str | bool | int | float]:
    return {name if "." in name else f"{PREFIX}{name}": value for name, value in attributes.items()}


def unix_ns(monotonic_s: float) -> int:
    """A time of this machine's monotonic clock, in nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


# --- of this process ------------------------------------------------------------------------------

_tracing: Tracing | None = None


def start(args: TracingArgs, **about: str) -> None:
    """Begin to trace in this process, if the configuration says so."""
    global _tracing
    _tracing = Tracing(args, about) if args.otlp_traces_endpoint is not None else None


def current() -> Tracing | None:
    """What traces in this process; None if nothing does."""
    return _tracing
