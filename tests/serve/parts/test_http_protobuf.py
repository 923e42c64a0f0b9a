"""Traces over HTTP, without a server. Those over gRPC: tests/serve/speculative."""

from __future__ import annotations

import gzip
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deployments.config.tracing import TracingArgs
from deployments.observability.spans import Tracing


def test_spans_are_sent_as_protobuf_over_http() -> None:
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1/traces"
    args = TracingArgs(otlp_traces_endpoint=address, protocol="http/protobuf")
    tracing = Tracing(args, {"process": "test"})
    with tracing.begin("outer") as outer, outer.child("inner", {"n": 3}):
        pass
    tracing.flush(5)
    server.shutdown()
    server.server_close()
    spans = [
        s for _, r in got for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans
    ]
    assert {path for path, _ in got} == {"/v1/traces"}
    assert {span.name for span in spans} == {"outer", "inner"}
