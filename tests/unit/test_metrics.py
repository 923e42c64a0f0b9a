"""/metrics, without a server."""

import ast
import inspect
import re
from pathlib import Path

from cfg_core.errors import OverloadedError
from deployments.ingress import metric_families
from deployments.ingress.metrics import Metrics


def lines(metrics):
    return [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]


def test_requests_are_counted_by_path_status_and_tenant():
    metrics = Metrics("i1", ["/v1/completions"], dict)
    metrics.answered("/v1/completions", 200, "a", 0.02, 1.5)
    metrics.answered("/v1/completions", 200, "a", 0.03, 1.5)
    metrics.answered("/v1/completions", 429, None, 0.001, 0.001)
    metrics.answered("/v1/completions", None, "a", None, 3.0)
    told = lines(metrics)
    assert (
        'cfg_serve_requests_total{ingress="i1",path="/v1/completions",status="200",tenant="a"} 2.0'
        in told
    )
    assert (
        'cfg_serve_requests_total{ingress="i1",path="/v1/completions",status="429",tenant="-"} 1.0'
        in told
    )
    assert (
        'cfg_serve_requests_total{ingress="i1",path="/v1/completions",status="left",tenant="a"} 1.0'
        in told
    )
    assert 'cfg_serve_first_byte_seconds_count{ingress="i1",path="/v1/completions"} 3.0' in told
    assert (
        'cfg_serve_request_seconds_bucket{ingress="i1",le="2.5",path="/v1/completions"} 3.0' in told
    )


def test_unknown_paths_share_one_label():
    metrics = Metrics("i1", ["/v1/completions"], dict)
    for i in range(100):
        metrics.answered(f"/{i}", 404, "a", 0.0, 0.0)
    assert (
        'cfg_serve_requests_total{ingress="i1",path="other",status="404",tenant="a"} 100.0'
        in lines(metrics)
    )


def test_values_are_read_when_scraped():
    values = {"replicas": 3.0}
    metrics = Metrics("i1", [], lambda: values)
    values["replicas"] = 5
    values["kv_blocks_free"] = {"r1": 7, "r2": 8}
    values["guided_tokens"] = 9
    told = lines(metrics)
    assert 'cfg_serve_replicas{ingress="i1"} 5.0' in told
    assert 'cfg_serve_kv_blocks_free{ingress="i1",replica="r1"} 7.0' in told
    assert 'cfg_serve_kv_blocks_free{ingress="i1",replica="r2"} 8.0' in told
    assert 'cfg_serve_guided_tokens_total{ingress="i1"} 9.0' in told


def test_values_of_several_generators_are_told_by_the_name_of_the_model():
    values = {
        "a": {"replicas": 1, "kv_blocks_free": {"r1": 7}, "calls": {"direct": 3}},
        "b": {"kv_blocks_free": {"r2": 8}},
    }
    told = lines(Metrics("i1", [], lambda: {"open_requests": 2}, lambda: values))
    assert 'cfg_serve_replicas{ingress="i1",model="a"} 1.0' in told
    assert 'cfg_serve_kv_blocks_free{ingress="i1",model="a",replica="r1"} 7.0' in told
    assert 'cfg_serve_kv_blocks_free{ingress="i1",model="b",replica="r2"} 8.0' in told
    assert 'cfg_serve_calls_total{ingress="i1",model="a",way="direct"} 3.0' in told
    assert 'cfg_serve_open_requests{ingress="i1"} 2.0' in told
    assert not any(line.startswith('cfg_serve_replicas{ingress="i1",model="b"') for line in told)


def test_the_only_generator_needs_no_name():
    told = lines(Metrics("i1", [], dict, lambda: {"": {"replicas": 1}}))
    assert 'cfg_serve_replicas{ingress="i1"} 1.0' in told


def test_refusals_are_counted_by_reason():
    metrics = Metrics("i1", [], dict)
    metrics.answered("/", 429, "a", 0.0, 0.0, "queue")
    metrics.answered("/", 429, "a", 0.0, 0.0, "rate")
    metrics.answered("/", 429, "a", 0.0, 0.0, "queue")
    told = lines(metrics)
    assert 'cfg_serve_refused_requests_total{ingress="i1",reason="queue"} 2.0' in told
    assert 'cfg_serve_refused_requests_total{ingress="i1",reason="rate"} 1.0' in told


def given_reasons():
    """The third argument of each OverloadedError that the code makes, and its default."""
    yield inspect.signature(OverloadedError).parameters["reason"].default
    root = Path(__file__).parents[2]
    for path in (*(root / "cfg_core").rglob("*.py"), *(root / "deployments").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OverloadedError":
                named = [given.value for given in node.keywords if given.arg == "reason"]
                reasons = [*node.args[2:], *named]
                yield from (one.value for one in reasons if isinstance(one, ast.Constant))


def test_every_reason_is_known():
    """Each reason that the code gives is in the table, and has a series from the start."""
    given = set(given_reasons())
    assert len(given) >= 6
    assert given <= metric_families.REFUSALS.keys()
    told = lines(Metrics("i1", [], dict))
    for reason in metric_families.REFUSALS:
        assert f'cfg_serve_refused_requests_total{{ingress="i1",reason="{reason}"}} 0.0' in told


def test_waits_are_a_histogram():
    metrics = Metrics("i1", [], dict)
    metrics.waited("a", 0.03)
    assert 'cfg_serve_admission_wait_seconds_bucket{ingress="i1",le="0.05"} 1.0' in lines(metrics)
    metrics = Metrics("i1", [], dict, several=True)
    metrics.waited("a", 0.03)
    metrics.waited("b", 0.03)
    told = lines(metrics)
    assert 'cfg_serve_admission_wait_seconds_count{ingress="i1",model="a"} 1.0' in told
    assert 'cfg_serve_admission_wait_seconds_count{ingress="i1",model="b"} 1.0' in told


def test_every_family_is_told_by_its_type_and_name():
    values = {f.name: {"x": 1.0} if f.labels else 1.0 for f in metric_families.READ}
    metrics = Metrics("i1", ["/"], lambda: values)
    metrics.answered("/", 429, "a", 0.1, 0.2, "queue")
    metrics.waited("a", 0.1)
    metrics.charged("a", 1)
    told = metrics.text().decode()
    for family in metric_families.ALL:
        assert f"# TYPE {family.full_name} {family.kind}\n" in told, family
        assert f"# HELP {family.full_name} {family.help}\n" in told, family
    kinds = set(re.findall(r"^# TYPE (\S+)", told, re.MULTILINE))
    created = {name for name in kinds if name.endswith("_created")}
    assert kinds - created == {family.full_name for family in metric_families.ALL}
