"""Spans without a server: what they hold, who is below whom, and that tracing is off by default."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from cfg_core.vllm_plugin import wire
from deployments.config.tracing import TracingArgs
from deployments.observability import spans
from deployments.observability.spans import Tracing


@pytest.fixture
def exporter(monkeypatch):
    made = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda _: made)
    return made


def tracing_of(ratio=1.0):
    args = TracingArgs(otlp_traces_endpoint="http://nowhere:4317", sampling_ratio=ratio)
    return Tracing(args, {"process": "test"})


def test_it_is_off_by_default():
    spans.start(TracingArgs())
    assert spans.current() is None
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from deployments.ingress import guard;"
            " from deployments.observability import spans;"
            " from deployments.config.tracing import TracingArgs;"
            " spans.start(TracingArgs()); assert not [m for m in sys.modules if"
            " m.startswith('opentelemetry')]",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ValidationError):
        TracingArgs(otlp_traces_endpoint="collector:4317")


def test_another_process_goes_on_by_headers(exporter):
    tracing = tracing_of()
    with tracing.begin("outer", {"n": 1, "a.b": 2}) as outer:
        inner = tracing.under(outer.headers, "inner", {})
    inner.fail(ValueError("the prompt's text"))
    inner.end()
    inner.end()
    tracing.flush(5)
    first, second = exporter.get_finished_spans()
    assert (first.name, second.name) == ("outer", "inner")
    assert second.parent.span_id == first.context.span_id
    assert dict(first.attributes) == {"cfg_serve.n": 1, "a.b": 2}
    assert second.attributes["error.type"] == "ValueError"
    assert "prompt" not in second.to_json()


def test_an_error_inside_marks_the_span(exporter):
    tracing = tracing_of()
    with pytest.raises(KeyError), tracing.begin("outer") as outer, outer.child("inner"):
        raise KeyError("x")
    tracing.flush(5)
    assert [not span.status.is_ok for span in exporter.get_finished_spans()] == [True, True]


def test_a_ratio_of_0_follows_the_caller(exporter):
    tracing = tracing_of(0.0)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tracing.begin("mine").end()
    tracing.under({"traceparent": caller}, "theirs", {}).end()
    tracing.under({"traceparent": "nonsense"}, "odd", {}).end()
    tracing.flush(5)
    assert [span.name for span in exporter.get_finished_spans()] == ["theirs"]


def test_of_a_caller_only_the_trace_and_its_parent_go_on(exporter):
    caller = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "vendor=" + "x" * 200}
    with tracing_of().under(caller, "theirs", {}) as span:
        assert span.headers.keys() == {"traceparent"}
        assert span.headers["traceparent"].startswith(f"00-{'1' * 32}-")


def test_one_that_is_not_sampled_tells_others_so(exporter):
    span = tracing_of(0.0).begin("mine")
    assert not span.is_recording
    assert int(span.headers["traceparent"][-2:], 16) & 1 == 0  # the flag "sampled"
    assert tracing_of(1.0).begin("mine").is_recording


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_a_client_who_leaves_is_no_failure(exporter, error):
    tracing = tracing_of()
    with pytest.raises(type(error)), tracing.begin("outer"):
        raise error
    tracing.flush(5)
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes) == {"cfg_serve.client_left": True}
    assert span.status.is_unset


def test_the_first_failure_counts(exporter):
    tracing = tracing_of()
    with tracing.begin("outer") as span:
        span.fail(ValueError())
        span.fail("500")
    tracing.flush(5)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == span.status.description == "ValueError"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "cfg-serve"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=mine"}, "mine"),
    ],
)
def test_the_environment_may_name_the_service(exporter, monkeypatch, environment, name):
    for one in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(one, raising=False)
    for one, value in environment.items():
        monkeypatch.setenv(one, value)
    tracing = tracing_of()
    tracing.begin("outer").end()
    tracing.flush(5)
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == name


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_mute_collector_holds_nothing_up(protocol):
    """It takes connections and never answers. Both `flush` and the end of the process are quick."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        code = f"""
import time
from deployments.config.tracing import TracingArgs
from deployments.observability.spans import Tracing
address = "http://127.0.0.1:{mute.getsockname()[1]}"
tracing = Tracing(TracingArgs(otlp_traces_endpoint=address, protocol="{protocol}"), {{}})
tracing.begin("x").end()
began = time.monotonic()
tracing.flush(0.5)
print(time.monotonic() - began, time.time())
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        )
        ended = time.time()
    flushed_in, at = map(float, done.stdout.split())
    assert 0.5 <= flushed_in < 4
    assert ended - at < 4


def test_times_of_the_monotonic_clock(exporter):
    tracing = tracing_of()
    outer = tracing.begin("outer", start_s=time.monotonic() - 2)
    outer.end(time.monotonic() - 1)
    tracing.flush(5)
    (span,) = exporter.get_finished_spans()
    assert span.end_time - span.start_time == pytest.approx(1e9, rel=0.02)
    assert time.time_ns() - span.end_time == pytest.approx(1e9, rel=0.2)


def test_events_of_followers_travel_only_with_our_own_mark():
    events = [(0, "queued", 1.5)]
    ours = SimpleNamespace(kv_transfer_params=wire._marked(3))
    wire.mark_follower_events(ours, events)
    assert wire.follower_events(ours) == events
    assert wire.guided_tokens(ours) == 3
    assert wire.follower_events(SimpleNamespace(kv_transfer_params=wire._marked(3))) == []
    for params in (None, {"vllm": 1}):
        theirs = SimpleNamespace(kv_transfer_params=params)
        wire.mark_follower_events(theirs, events)
        assert theirs.kv_transfer_params == params
    wire.take_guided_tokens(ours)
    assert ours.kv_transfer_params is None
