"""Spans of the streams of one choice, and trace headers for vLLM, without an engine."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM

from cfg_core.vllm_plugin import wire
from cfg_core.vllm_plugin.pace import FrontendPace
from deployments.config.tracing import TracingArgs
from deployments.generator.engine.calls import EngineCalls
from deployments.generator.engine.running_request import Choice, RunningRequest
from deployments.generator.engine.trace_spans import ChoiceSpans, TracedRequest
from deployments.generator.vllm_server import VllmServer
from deployments.observability import spans
from deployments.observability.spans import Tracing
from deployments.requests.usage import Meter


@pytest.fixture
def exporter(monkeypatch):
    made = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda _: made)
    return made


def made_by(exporter, outputs, *, followers=1, ends_at=None, aborted=False, keeps=None):
    """The spans of a choice whose outputs these are, by name.

    ends_at: the output in which the frontend finds a stop string.
    keeps: how many tokens the frontend keeps of that output.
    """
    tracing = Tracing(TracingArgs(otlp_traces_endpoint="http://nowhere:4317"), {})
    states = {"r": SimpleNamespace(parent_req=None, request_index=0)}

    def process(given, timestamp):
        (output,) = given
        if output.finish_reason is not None or (ends_at and output is outputs[ends_at]):
            states.pop("r")
            del output.new_token_ids[keeps:]

    engine = MagicMock(AsyncLLM)  # spans need no more of it than these two
    engine.output_processor = SimpleNamespace(request_states=states, process_outputs=process)
    engine.engine_core = engine.input_processor = MagicMock()
    calls = EngineCalls(engine, MagicMock(FrontendPace))
    request = SimpleNamespace(request_id="r", sampling_params=None)
    with tracing.begin("replica") as parent:
        entry = Choice(request, RunningRequest(Meter(), 8))
        entry.spans = ChoiceSpans(TracedRequest(parent), None, followers)
        calls._entries["r"] = entry
        for at, output in enumerate(outputs, 1):
            calls.process_outputs([output], float(at))
        if aborted:
            calls._leave(entry)
    tracing.flush(5)
    return {span.name: dict(span.attributes) for span in exporter.get_finished_spans()}


def output(num_tokens, guided=0, finish=None, events=()):
    made = EngineCoreOutput(
        request_id="r",
        new_token_ids=[7] * num_tokens,
        finish_reason=finish,
        kv_transfer_params=wire._marked(guided) if guided or events else None,
    )
    if events:
        wire.mark_follower_events(made, list(events))
    return made


@pytest.mark.parametrize(
    ("last", "more", "reason"),
    [
        (output(1, finish=FinishReason.LENGTH), {}, "length"),
        (output(1, finish=FinishReason.STOP), {}, "stop"),
        (output(1), {"ends_at": 1}, "stop"),
        (output(1), {"aborted": True}, "abort"),
    ],
)
def test_why_a_choice_ended(exporter, last, more, reason):
    told = made_by(exporter, [output(1), last], followers=0, **more)
    assert told["stream: leader"]["cfg_serve.finish_reason"] == reason


def test_tokens_behind_a_stop_string_do_not_count(exporter):
    told = made_by(exporter, [output(2, 2), output(4, 4)], ends_at=1, keeps=1)
    assert told["stream: leader"]["cfg_serve.guided_tokens"] == 3
    assert told["stream: follower 0"]["cfg_serve.guided_tokens"] == 3


def test_a_follower_that_never_was_has_no_span(exporter):
    ended = output(1, finish=FinishReason.LENGTH)
    assert made_by(exporter, [ended], followers=2).keys() == {"replica", "stream: leader"}


def test_a_follower_of_which_something_is_known_has_a_span(exporter):
    first = output(1, events=[(0, "queued", 1.0)])
    ended = output(1, finish=FinishReason.LENGTH)
    told = made_by(exporter, [first, ended], followers=2)
    assert told.keys() == {"replica", "stream: leader", "stream: follower 0"}


@pytest.mark.parametrize(
    ("endpoint", "names"),
    [(None, {"x-request-id"}), ("http://c:4317", {"x-request-id", "traceparent"})],
)
def test_vllm_gets_a_trace_only_if_it_traces(endpoint, names):
    config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
    server = SimpleNamespace(_engine=SimpleNamespace(vllm_config=config))
    given = {"x-request-id": "r", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    assert VllmServer._headers(server, given, None).keys() == names
