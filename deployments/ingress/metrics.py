"""The metrics of /metrics, in Prometheus' text format.

They describe this ingress, its queue, and the replicas as this ingress sees them. Each replica of
CfgRouter answers for itself, under its own `ingress` label. vLLM's own metrics (`ray_vllm_*`),
Serve's and Ray's are on the metrics port of each Ray node. No metric contains anything that a
client wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
UNKNOWN = "other"


class _Gauges(Collector):
    """Gauges whose values are read at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, float]], ingress: str) -> None:
        self._read, self._ingress = read, ingress

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._read().items():
            gauge = GaugeMetricFamily(
                f"cfg_serve_{name}", name.replace("_", " "), labels=["ingress"]
            )
            gauge.add_metric([self._ingress], value)
            yield gauge


class Metrics:
    """The metrics of one ingress.

    paths: paths that have a label of their own. All others are labelled `other`.
    gauges: returns names, without a prefix, and current values.
    """

    def __init__(
        self, ingress: str, paths: Iterable[str], gauges: Callable[[], Mapping[str, float]]
    ) -> None:
        self._ingress, self._paths = ingress, frozenset(paths)
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(gauges, ingress))
        self._requests = Counter(
            "cfg_serve_requests",
            "Requests that have ended.",
            ("ingress", "path", "status", "tenant"),
            registry=self._registry,
        )
        self._charged = Counter(
            "cfg_serve_charged_tokens",
            "Tokens charged to the tenant: prompts and outputs of all streams.",
            ("ingress", "tenant"),
            registry=self._registry,
        )
        names = ("ingress", "path")
        self._first_byte = Histogram(
            "cfg_serve_first_byte_seconds",
            "Seconds from the arrival of a request to the first byte of its answer.",
            names,
            registry=self._registry,
            buckets=SECONDS,
        )
        self._duration = Histogram(
            "cfg_serve_request_seconds",
            "Seconds from the arrival of a request to the last byte of its answer.",
            names,
            registry=self._registry,
            buckets=SECONDS,
        )

    def answered(
        self,
        path: str,
        status: int | None,
        tenant: str | None,
        first_byte_s: float | None,
        duration_s: float,
    ) -> None:
        """Count a request that has ended.

        status: None if the client left before there was an answer.
        tenant: None if unknown.
        first_byte_s: None if there was no first byte.
        """
        path = path if path in self._paths else UNKNOWN
        self._requests.labels(self._ingress, path, str(status or "left"), tenant or "-").inc()
        if first_byte_s is not None:
            self._first_byte.labels(self._ingress, path).observe(first_byte_s)
        self._duration.labels(self._ingress, path).observe(duration_s)

    def charged(self, tenant: str, num_tokens: int) -> None:
        """Count the tokens charged for a request: what the engine did for it.

        The count is that of requests/usage.py.
        """
        self._charged.labels(self._ingress, tenant).inc(num_tokens)

    def text(self) -> bytes:
        return generate_latest(self._registry)
