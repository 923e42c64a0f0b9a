"""The metrics of /metrics, in Prometheus' text format.

They describe this ingress, its queue, and the replicas as this ingress sees them. Each replica of
CfgRouter answers for itself, under its own `ingress` label. metric_families.py names them. vLLM's
own metrics (`ray_vllm_*`), Serve's and Ray's are on the metrics port of each Ray node. No metric
contains anything that a client wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.ingress import metric_families
from deployments.ingress.metric_families import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds of the histograms' buckets."""
UNKNOWN = "other"

Reading: TypeAlias = Mapping[str, float | Mapping[str, float]]
"""Values by the names of metric_families.READ; by the values of its label if a family has one."""

ReadModels: TypeAlias = Callable[[], Mapping[str, Reading]]
"""Returns the values of each generator by its name, or by "" if there is only one."""


class _Read(Collector):
    """The families whose values are read at each scrape."""

    def __init__(self, read: Callable[[], Reading], models: ReadModels, ingress: str) -> None:
        self._read, self._models, self._ingress = read, models, ingress

    def collect(self) -> Iterable[Metric]:
        shared, models = self._read(), self._models()
        for family in metric_families.READ:
            own = {name: read[family.name] for name, read in models.items() if family.name in read}
            if family.name in shared:
                own = {"": shared[family.name]}
            if own:
                yield self._metric(family, own)

    def _metric(self, family: Family, values: Reading) -> Metric:
        """values: by the name of the model; "" if the metric is of no single one."""
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        of_models = ["model"] if any(values) else []
        metric = kind(
            f"{metric_families.PREFIX}{family.name}",
            family.help,
            labels=["ingress", *of_models, *family.labels],
        )
        for model, value in values.items():
            labels = [self._ingress, *([model] if of_models else [])]
            if not isinstance(value, Mapping):
                metric.add_metric(labels, value)
                continue
            for label, one in value.items():
                metric.add_metric([*labels, label], one)
        return metric


class Metrics:
    """The metrics of one ingress.

    paths: paths that have a label of their own. All others are labelled `other`.
    read, models: called at each scrape; return what metric_families.READ names, as far as it is
    there.
    several: whether there are several generators. What is of one has the label `model` then.
    """

    def __init__(
        self,
        ingress: str,
        paths: Iterable[str],
        read: Callable[[], Reading],
        models: ReadModels = dict,
        several: bool = False,
    ) -> None:
        self._ingress, self._paths = ingress, frozenset(paths)
        self._registry = CollectorRegistry()
        self._registry.register(_Read(read, models, ingress))
        self._requests = self._counter(metric_families.REQUESTS)
        self._charged = self._counter(metric_families.CHARGED)
        self._refused = self._counter(metric_families.REFUSED)
        for reason in metric_families.REFUSALS:
            self._refused.labels(ingress, reason)  # 0, so that the first refusal is an increase
        self._first_byte = self._histogram(metric_families.FIRST_BYTE)
        self._duration = self._histogram(metric_families.DURATION)
        self._wait_labels = ["model"] if several else []
        self._wait = self._histogram(metric_families.WAIT, *self._wait_labels)

    def _counter(self, family: Family) -> Counter:
        name, labels = f"{metric_families.PREFIX}{family.name}", ("ingress", *family.labels)
        return Counter(name, family.help, labels, registry=self._registry)

    def _histogram(self, family: Family, *more: str) -> Histogram:
        labels = ("ingress", *family.labels, *more)
        return Histogram(
            family.full_name, family.help, labels, registry=self._registry, buckets=SECONDS
        )

    def path_of(self, path: str) -> str:
        """A path as labels and names tell it, so that clients cannot make more of them."""
        return path if path in self._paths else UNKNOWN

    def answered(
        self,
        path: str,
        status: int | None,
        tenant: str | None,
        first_byte_s: float | None,
        duration_s: float,
        refused: str | None = None,
    ) -> None:
        """Count a request that has ended.

        status, first_byte_s: None if the client left before there was an answer.
        tenant: None if unknown.
        refused: what was full, if that is why it was refused.
        """
        path = self.path_of(path)
        self._requests.labels(self._ingress, path, str(status or "left"), tenant or "-").inc()
        if refused is not None:
            self._refused.labels(self._ingress, refused).inc()
        if first_byte_s is not None:
            self._first_byte.labels(self._ingress, path).observe(first_byte_s)
        self._duration.labels(self._ingress, path).observe(duration_s)

    def waited(self, model: str, seconds: float) -> None:
        """Count the time that a request waited in the queue of a generator."""
        self._wait.labels(self._ingress, *([model] if self._wait_labels else [])).observe(seconds)

    def charged(self, tenant: str, num_tokens: int) -> None:
        """Count the tokens charged for a request, as the engine counted them."""
        self._charged.labels(self._ingress, tenant).inc(num_tokens)

    def text(self) -> bytes:
        return generate_latest(self._registry)
