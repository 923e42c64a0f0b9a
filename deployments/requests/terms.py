"""The terms on which a request wants to be served: how urgent it is, and how long it may take.

`priority` (an integer, lower is sooner, 0 by default) is vLLM's own field; here it also orders the
queue in front of the engines. `timeout` (seconds) is ours, as a field of the body or as the header
X-Request-Timeout: when it has passed, a request ends with an error and its group leaves the engine,
wherever it is. Encoders take a `timeout`, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import RequestError

PRIORITY, TIMEOUT, TIMEOUT_HEADER = "priority", "timeout", "x-request-timeout"

SOONEST, LATEST = -1000, 1000


@dataclass(frozen=True, kw_only=True)
class Terms:
    """priority: lower is sooner. timeout_s: from the request's arrival; None: no limit."""

    priority: int = 0
    timeout_s: float | None = None


def take_terms(
    body: dict[str, Any],
    headers: Mapping[str, str],
    *,
    default_timeout_s: float | None,
    min_priority: int = SOONEST,
) -> Terms:
    """Read the terms of a request, and take `timeout` out of its body. Raises RequestError.

    min_priority: the most urgent that the caller may ask for.
    """
    timeout_s = take_timeout(body, headers, default_timeout_s)
    priority = body.get(PRIORITY)
    if priority is None:
        priority = max(0, min_priority)
    if (
        not isinstance(priority, int)
        or isinstance(priority, bool)
        or not SOONEST <= priority <= LATEST
    ):
        raise RequestError(
            f"priority must be an integer from {SOONEST} to {LATEST}, lower is sooner: 0 is usual.",
            PRIORITY,
        )
    if priority < min_priority:
        hint = f"ask for {min_priority} or more"
        raise RequestError(
            f"priority {priority} is more urgent than this key allows: {hint}.", PRIORITY
        )
    return Terms(priority=priority, timeout_s=timeout_s)


def take_timeout(
    body: dict[str, Any], headers: Mapping[str, str], default_timeout_s: float | None
) -> float | None:
    """Take `timeout` out of a request's body. Seconds; the sooner of field and header if both are
    given, the default if neither. Raises RequestError."""
    given = (body.pop(TIMEOUT, None), headers.get(TIMEOUT_HEADER))
    return min((_seconds(value) for value in given if value is not None), default=default_timeout_s)


def _seconds(value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(
            "timeout must be a number of seconds above 0, as a field or as the header"
            f" {TIMEOUT_HEADER}.",
            TIMEOUT,
        )
    return seconds
