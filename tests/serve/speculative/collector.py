"""A collector of OpenTelemetry spans, over gRPC, in the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Seen:
    """One span; times in nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    about: dict[str, Any]
    process: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans on a free port of the loopback address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # not typed
        add(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        """Receive spans: the name is the protocol's."""
        with self._lock:
            for resource in request.resource_spans:
                process = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._seen += [_seen(span, process) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(None)

    def trace(self, of: Callable[[Seen], bool], count: int, limit_s: float = 20) -> list[Seen]:
        """Wait until the trace of the span that matches has `count` spans. Return all, by start."""
        deadline = time.monotonic() + limit_s
        found: list[Seen] = []
        while time.monotonic() < deadline and len(found) < count:
            time.sleep(0.1)
            with self._lock:
                ids = {span.trace for span in self._seen if of(span)}
                found = [span for span in self._seen if span.trace in ids]
        time.sleep(1.5)  # spans that should not be there would come by now
        with self._lock:
            found = [span for span in self._seen if span.trace in ids]
        return sorted(found, key=lambda span: span.start)


def tree(spans: Iterable[Seen], parent: str | None = None, depth: int = 0) -> list[str]:
    """The spans as indented lines with milliseconds: since the trace began, and how long."""
    spans = list(spans)
    began = min(span.start for span in spans)
    ids = {span.id for span in spans}
    lines = []
    for span in spans:
        if (span.parent if span.parent in ids else None) == parent:
            at, took = (span.start - began) / 1e6, (span.end - span.start) / 1e6
            lines.append(f"{at:8.1f} {took:8.1f}  {'  ' * depth}{span.name}")
            lines += tree(spans, span.id, depth + 1)
    return lines


def _seen(span: Any, process: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        _attributes(span.attributes),
        process,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
