"""Traces and JSON logs of a real server.

Spans go to a real receiver. Every line of our processes' logs is an object with our fields.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.speculative.collector import Collector, Seen, tree
from tools.serving.process import ServeProcess

pytestmark = pytest.mark.slow

GUIDED = {"guidance_scale": 2.0, "negative_prompt": "A story about the farm."}
SLACK_NS = 5_000_000
"""How far two clocks, or the ends of two spans, may differ."""


@pytest.fixture(scope="module")
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        until = time.monotonic() + 30
        while not re.search(r'calls_total{.*way="direct"} [1-9]', client.get("/metrics").text):
            assert time.monotonic() < until, "all calls go through Serve"
            client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1})
        yield client


def ask(http: httpx.Client, **fields: Any) -> tuple[str, httpx.Response]:
    """Send a completion under a trace of the client's own; returns the trace's id."""
    return ask_with_flag("01", http, **fields)


def ask_with_flag(flag: str, http: httpx.Client, **fields: Any) -> tuple[str, httpx.Response]:
    """The same; flag: 01 if the client samples the trace, 00 if not."""
    trace = uuid.uuid4().hex
    body = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True, **fields}
    parent = f"00-{trace}-00f067aa0ba902b7-{flag}"
    headers = {"traceparent": parent, "x-request-id": f"r-{trace}"}
    return trace, http.post("/v1/completions", json=body, headers=headers)


def by_name(spans: list[Seen]) -> dict[str, Seen]:
    names = [span.name for span in spans]
    assert len(set(names)) == len(names), names
    return {span.name: span for span in spans}


def check_tree(spans: list[Seen], parents: dict[str, str]) -> None:
    """Check who is below whom, and that no span reaches beyond the one above it."""
    named = by_name(spans)
    assert named.keys() == parents.keys()
    for name, parent in parents.items():
        if not parent:
            assert named[name].parent == "00f067aa0ba902b7"
            continue
        above, span = named[parent], named[name]
        assert span.parent == above.id, name
        assert above.start - SLACK_NS <= span.start <= span.end <= above.end + SLACK_NS, name


ROOT = "POST /v1/completions"
PLAIN = {
    ROOT: "",
    "queue": ROOT,
    "call": ROOT,
    "replica": "call",
    "render": "replica",
    "stream: leader": "replica",
}
PAIR = {**PLAIN, "stream: follower 0": "replica"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_guided_request_is_one_trace_with_both_streams(
    http: httpx.Client, collector: Collector, stream: bool
) -> None:
    sent = time.time_ns()
    trace, answer = ask(http, **GUIDED, stream=stream)
    done = time.time_ns()
    assert answer.status_code == 200, answer.text
    spans = collector.trace(lambda span: span.trace == trace, len(PAIR))
    check_tree(spans, PAIR)
    named = by_name(spans)
    print("\n".join(tree(spans)))
    root = named[ROOT]
    assert sent - SLACK_NS <= root.start < root.end <= done + SLACK_NS
    assert root.about["http.response.status_code"] == 200
    assert root.about["cfg_serve.request_id"] == f"r-{trace}"
    assert root.about["cfg_serve.tenant"] == "anonymous"
    call = named["call"].about
    assert call["cfg_serve.way"] == "direct"
    assert call["cfg_serve.reason"] == "only"
    assert call["cfg_serve.replica"] == named["replica"].about["cfg_serve.replica"]
    assert named["replica"].process["cfg_serve.process"] == "replica"
    assert root.process["cfg_serve.process"] == "ingress"
    assert root.process["service.name"] == "cfg-serve"
    leader, follower = named["stream: leader"].about, named["stream: follower 0"].about
    assert (leader["cfg_serve.weight"], follower["cfg_serve.weight"]) == (2.0, -1.0)
    assert leader["cfg_serve.guided_tokens"] == follower["cfg_serve.guided_tokens"] == 20
    assert leader["gen_ai.usage.completion_tokens"] == 20
    assert leader["cfg_serve.finish_reason"] == "length"
    for about in (leader, follower):
        assert about["gen_ai.usage.prompt_tokens"] > 2
        assert about["cfg_serve.cached_tokens"] >= 0
        assert about["cfg_serve.preemptions"] == 0
        times = [value for name, value in about.items() if name.startswith("gen_ai.latency.")]
        assert len(times) == 3
        assert all(0 <= value < 60 for value in times)
    assert not any(span.failed for span in spans)


def test_no_text_is_in_spans(http: httpx.Client, collector: Collector) -> None:
    trace, answer = ask(http, prompt="The secret word is xylophone", **GUIDED)
    written = answer.json()["choices"][0]["text"]
    told = json.dumps([s.about for s in collector.trace(lambda s: s.trace == trace, len(PAIR))])
    assert "xylophone" not in told
    assert "farm" not in told
    assert written.strip() not in told


def test_a_plain_request_has_one_stream(http: httpx.Client, collector: Collector) -> None:
    trace, _ = ask(http)
    spans = collector.trace(lambda span: span.trace == trace, len(PLAIN))
    check_tree(spans, PLAIN)
    assert "cfg_serve.weight" not in by_name(spans)["stream: leader"].about


def test_a_window_and_several_followers(http: httpx.Client, collector: Collector) -> None:
    followers = [{"weight": -0.5, "prompt": text} for text in ("The farm.", "A sad story.")]
    trace, answer = ask(http, guidance_streams=followers, guidance_start=5, guidance_end=12)
    assert answer.status_code == 200, answer.text
    tree_of = {**PAIR, "stream: follower 1": "replica"}
    spans = collector.trace(lambda span: span.trace == trace, len(tree_of))
    check_tree(spans, tree_of)
    named = by_name(spans)
    leader = named["stream: leader"]
    for i in (0, 1):
        follower = named[f"stream: follower {i}"]
        assert follower.about["cfg_serve.guided_tokens"] == 7
        assert leader.start < follower.start < follower.end < leader.end


def test_choices_have_their_own_streams(http: httpx.Client, collector: Collector) -> None:
    trace, _ = ask(http, n=2, **GUIDED)
    spans = collector.trace(lambda span: span.trace == trace, len(PAIR) + 2)
    assert sorted(span.name for span in spans if span.name.startswith("stream")) == [
        "stream: follower 0",
        "stream: follower 0",
        "stream: leader",
        "stream: leader",
    ]


def test_a_stop_string_before_the_window(http: httpx.Client, collector: Collector) -> None:
    """The frontend finds the string, and the window never opens: there is no follower."""
    trace, answer = ask(http, max_tokens=200, guidance_start=150, stop=[" "], **GUIDED)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    spans = collector.trace(lambda span: span.trace == trace, len(PLAIN))
    check_tree(spans, PLAIN)
    leader = by_name(spans)["stream: leader"].about
    assert leader["cfg_serve.finish_reason"] == "stop"
    assert leader["cfg_serve.guided_tokens"] == 0


def test_a_request_that_its_client_does_not_sample_has_no_span(
    http: httpx.Client, collector: Collector
) -> None:
    trace, answer = ask_with_flag("00", http, **GUIDED)
    assert answer.status_code == 200
    sampled, _ = ask(http)
    collector.trace(lambda span: span.trace == sampled, len(PLAIN))
    assert collector.trace(lambda span: span.trace == trace, 1, limit_s=2) == []


def test_a_client_who_leaves_is_no_failure(http: httpx.Client, collector: Collector) -> None:
    trace = uuid.uuid4().hex
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    spans = collector.trace(lambda span: span.trace == trace, len(PLAIN))
    assert not any(span.failed for span in spans)
    assert by_name(spans)["call"].about["cfg_serve.client_left"] is True


def test_a_refused_request_is_marked(http: httpx.Client, collector: Collector) -> None:
    trace, answer = ask(http, prompt="word " * 2000)
    assert answer.status_code == 400
    spans = collector.trace(lambda span: span.trace == trace, 5)
    named = by_name(spans)
    assert named[ROOT].about["http.response.status_code"] == 400
    assert named["call"].failed
    assert named["replica"].failed
    assert named["call"].about["error.type"].endswith("Error")
    assert "word" not in json.dumps([span.about for span in spans])


def test_a_request_that_runs_out_of_time_is_marked(
    http: httpx.Client, collector: Collector
) -> None:
    trace, answer = ask(http, max_tokens=400, timeout=0.3, **GUIDED)
    assert answer.status_code == 504
    named = by_name(collector.trace(lambda span: span.trace == trace, len(PAIR)))
    assert named[ROOT].failed
    assert named["call"].about["error.type"] == "DeadlineError"
    assert named["stream: leader"].about["cfg_serve.finish_reason"] == "abort"
    assert named["stream: leader"].end <= named[ROOT].end + 1_000_000_000


def test_probes_are_not_traced(http: httpx.Client, collector: Collector) -> None:
    for path in ("/ready", "/health", "/metrics"):
        assert http.get(path).status_code == 200
    assert collector.trace(lambda span: "GET" in span.name, 1, limit_s=2) == []


def objects(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.strip()]


def test_every_line_of_the_logs_is_an_object_with_the_request_id(
    http: httpx.Client, server: ServeProcess
) -> None:
    trace, answer = ask(http, **GUIDED)
    logs = server.ray_logs()
    (ingress,) = (lines for name, lines in logs.items() if "serve/replica_cfg_CfgRouter" in name)
    (replica,) = (lines for name, lines in logs.items() if "serve/replica_cfg_ModelRe" in name)
    (line,) = (
        one
        for one in objects(ingress)
        if one.get("request_id") == f"r-{trace}" and "bytes_out" in one
    )
    assert line["status"] == 200
    assert line["path"] == "/v1/completions"
    assert line["tenant"] == "anonymous"
    assert line["method"] == "POST"
    assert line["bytes_in"] == len(answer.request.content)
    assert 0 < line["first_byte_ms"] <= line["end_ms"]
    assert line["levelname"] == "INFO"
    assert all("levelname" in one for one in objects(replica))
    core = [
        one
        for name, lines in logs.items()
        if "/worker-" in name
        for one in objects([line for line in lines if line.startswith("{")])
        if one.get("logger", "").startswith("vllm.")
    ]
    names = {one["logger"] for one in core}
    assert any(name.startswith("vllm.v1.engine.core") for name in names), names
    assert len({one["process"] for one in core}) >= 2, "the frontend and the engine core"


def test_a_collector_that_is_gone_does_no_harm(
    http: httpx.Client, collector: Collector, server: ServeProcess
) -> None:
    """Keep this test last: the collector stops in it."""
    began = time.monotonic()
    ask(http, **GUIDED)
    before = time.monotonic() - began
    collector.stop()
    slowest = 0.0
    for _ in range(30):
        began = time.monotonic()
        _, answer = ask(http, **GUIDED)
        assert answer.status_code == 200, answer.text
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < before + 2
    assert http.get("/ready").status_code == 200
