"""The Grafana dashboard and the alerts, with a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from deployments.ingress import metric_families
from tests.serve.stories.prometheus_process import PrometheusProcess, missing
from tools.serving.process import REPOSITORY, ServeProcess

pytestmark = pytest.mark.slow

DEPLOY = REPOSITORY / "deploy"

needs_prometheus = pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")

DASHBOARD = json.loads((DEPLOY / "grafana" / "cfg-serve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())

EMPTY = {
    "Share of drafts accepted": "no speculation here, so 0 / 0",
}
"""Panels whose only value on this server is NaN, and why."""

SUFFIXES = ("_bucket", "_sum", "_count")


def ours(expr: str) -> set[str]:
    """The metrics of the ingress that an expression names."""
    return set(re.findall(r"\bcfg_serve_\w+", expr))


def exists(name: str) -> bool:
    families = {family.full_name: family.kind for family in metric_families.ALL}
    if name in families:
        return families[name] != "histogram"
    base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
    return families.get(base) == "histogram"


def test_panels_do_not_overlap_and_fill_the_width() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"] for panel in PANELS)


def test_the_dashboard_and_the_alerts_name_only_metrics_that_exist() -> None:
    rules = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    named = set().union(*(ours(expr) for expr in [*rules, *(expr for _, expr in EXPRESSIONS)]))
    assert named
    assert [name for name in named if not exists(name)] == []


def test_every_metric_of_the_ingress_is_on_the_dashboard() -> None:
    named = set().union(*(ours(expr) for _, expr in EXPRESSIONS))
    bases = {name.removesuffix("_bucket") for name in named}
    assert {family.full_name for family in metric_families.ALL} - bases == set()


@needs_prometheus
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *command],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def a_little_of_everything(http: httpx.Client) -> None:
    guided = {"guidance_scale": 2.0, "negative_prompt": "A story about the farm."}
    ask: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12}
    window = {"guidance_start": 2, "guidance_end": 6}
    for more in ({}, guided, {**guided, "stream": True}, {**guided, **window}):
        answer = http.post("/v1/completions", json={**ask, **more})
        assert answer.status_code == 200, answer.text
    answer = http.post("/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": ["a", "b"]})
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def prometheus(server: ServeProcess, http: httpx.Client) -> Iterator[PrometheusProcess]:
    """A Prometheus that has scraped the server and its Ray for some seconds under load."""
    targets: dict[str, list[str]] = {"cfg-serve": [server.url.removeprefix("http://")]}
    if isinstance(server, ServeProcess):
        targets["ray"] = server.ray_metrics()
    with PrometheusProcess(targets) as process:
        for _ in range(12):
            a_little_of_everything(http)
            time.sleep(1)
        yield process


@needs_prometheus
@pytest.mark.parametrize(("title", "expr"), EXPRESSIONS)
def test_every_panel_has_data(prometheus: PrometheusProcess, title: str, expr: str) -> None:
    """Each expression of each panel has at least one series with numbers, or of EMPTY with NaN."""
    deadline = time.monotonic() + 40
    values: list[float] = []
    while time.monotonic() < deadline:
        values = prometheus.values(expr.replace("$instance", ".*"))
        if title in EMPTY:
            assert all(math.isnan(value) for value in values), EMPTY[title]
        if values and (title in EMPTY or not all(map(math.isnan, values))):
            return
        time.sleep(1)
    raise AssertionError(f"{title}: {expr} gives {values}")
