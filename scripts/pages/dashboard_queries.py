"""What a panel of the Grafana dashboard is, and how its queries are written in PromQL.

A scrape reaches one ingress of an instance, and what the others said before it is stale then. So
numbers of now are each ingress's last ones of a minute (NOW), and rates are of five minutes
(RANGE). What an ingress counts itself is summed. What it tells of replicas is the same in every
ingress of an instance, so its greatest value counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INGRESS = 'instance=~"$instance"'
RANGE, NOW = "5m", "1m"


@dataclass(frozen=True)
class Panel:
    """One panel.

    about: what it shows and what to look for.
    queries: PromQL, by how its series are called.
    unit: Grafana's name of the unit.
    is_stat: shows the last value only, in large.
    bad_above: values from here on are red.
    stacked: whether the series add up to something.
    at_most: the end of the axis, if the unit has one.
    """

    title: str
    about: str
    queries: Mapping[str, str]
    unit: str = "short"
    is_stat: bool = False
    bad_above: float | None = None
    stacked: bool = False
    at_most: float | None = None


def rate(name: str, more: str = "", selector: str = INGRESS) -> str:
    """The increase per second of a counter, of each series."""
    return f"rate({name}{{{selector}{more}}}[{RANGE}])"


def rate_of_ingresses(name: str, by: str = "", more: str = "") -> str:
    """The increase per second of what each ingress counts itself, summed."""
    return f"sum{f' by ({by})' if by else ''} ({rate(f'cfg_serve_{name}_total', more)})"


def rate_of_replicas(name: str, by: str = "", more: str = "") -> str:
    """The increase per second of what replicas count, which each ingress tells.

    With several generators, each has its own series.
    """
    labels = ", ".join(dict.fromkeys(("instance", "model", by))).removesuffix(", ")
    of_one = f"max by ({labels}) ({rate(f'cfg_serve_{name}_total', more)})"
    return f"sum{f' by ({by})' if by else ''} ({of_one})"


def last(name: str) -> str:
    """A number of now, of each series."""
    return f"last_over_time(cfg_serve_{name}{{{INGRESS}}}[{NOW}])"


def now_of_ingresses(name: str, by: str = "") -> str:
    """A number of now, summed over the ingresses, for each value of the label `by` if given."""
    return f"sum by ({by}) ({last(name)})" if by else f"sum ({last(name)})"


def now_of_replicas(name: str, by: str = "replica") -> str:
    """A number of now for each replica or model, as any ingress tells it."""
    return f"max by ({by}) ({last(name)})"


def quantiles(name: str, more: str = "", selector: str = INGRESS) -> dict[str, str]:
    """The median, and the times that one in twenty and one in a hundred exceed."""
    wanted = {"median": 0.5, "95 of 100": 0.95, "99 of 100": 0.99}
    buckets = f"sum by (le) ({rate(f'{name}_bucket', more, selector)})"
    return {legend: f"histogram_quantile({q}, {buckets})" for legend, q in wanted.items()}


API = ',path!~"/health|/ready|/metrics"'
KV_USE = f"1 - sum ({now_of_replicas('kv_blocks_free')}) / sum ({now_of_replicas('kv_blocks')})"
KV_USE_OF_REPLICA = f"1 - {now_of_replicas('kv_blocks_free')} / {now_of_replicas('kv_blocks')}"
TOKENS_PER_BATCH = " / ".join(
    rate_of_replicas(f"encoder_{what}", "model") for what in ("tokens", "batches")
)
VLLM = 'job="ray"'


def of_vllm(name: str) -> str:
    """The increase per second of a counter of vLLM's, over all engines."""
    return f"sum ({rate(f'ray_vllm_{name}_total', selector=VLLM)})"


def accepted_share(kind: str) -> str:
    """The share of drafts that were accepted, of guided or plain requests."""
    more = f',of="{kind}"'
    return " / ".join(rate_of_replicas(name, more=more) for name in ("drafts_accepted", "drafts"))
