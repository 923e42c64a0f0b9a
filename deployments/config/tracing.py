"""The section `tracing:` of `args:`: OpenTelemetry spans."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deployments.config.base import YamlArgs


class TracingArgs(YamlArgs):
    """The section `tracing:` of `args:`: spans of requests, sent to a collector by OTLP."""

    section = "tracing"

    otlp_traces_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Address of the collector, such as `http://127.0.0.1:4317`; with `http/protobuf` the whole
    address, such as `http://127.0.0.1:4318/v1/traces`. Default: no tracing. The environment
    variables OTEL_* of OpenTelemetry (headers, certificate, service name, attributes) count
    besides.
    """

    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    """The protocol of the collector's port."""

    sampling_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced. A request that brings a `traceparent` is traced if
    that says so, whatever the share; where API keys are configured, only requests with a valid key
    are traced at all.
    """
