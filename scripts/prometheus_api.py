"""What Prometheus' HTTP API answers to the queries of a Grafana dashboard."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMIT_S = 30.0


@dataclass(frozen=True)
class Series:
    """One series: its labels, and its values over time, in seconds since 1970."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


def filled_in(expr: str, instance: str = ".*", window: str = "5m") -> str:
    """A panel's expression with Grafana's variable replaced.

    window: of rates, which is 5m on the dashboard.
    """
    return expr.replace("$instance", instance).replace("[5m]", f"[{window}]")


def over(url: str, expr: str, start: float, end: float, step: float) -> list[Series]:
    """The series of an expression between two times. Raises ValueError with Prometheus' reason."""
    asked = {"query": expr, "start": start, "end": end, "step": step}
    found = _get(f"{url}/api/v1/query_range?{urllib.parse.urlencode(asked)}")["result"]
    return [_series(one["metric"], one["values"]) for one in found]


def now(url: str, expr: str) -> list[Series]:
    """The present values of an expression. Raises ValueError with Prometheus' reason."""
    found = _get(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")["result"]
    return [_series(one["metric"], [one["value"]]) for one in found]


def _series(labels: Mapping[str, str], points: list[list[Any]]) -> Series:
    times, values = zip(*((float(at), float(value)) for at, value in points), strict=True)
    return Series(labels, times, values)


def _get(address: str) -> Any:
    try:
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode()) from None
    return told["data"]
