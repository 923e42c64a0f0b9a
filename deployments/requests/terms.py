"""The terms of a request: its priority and its timeout.

`priority` is vLLM's own field: an integer, 0 by default; lower numbers are served sooner. Here it
also orders the queue in front of the engines. `timeout` is a field of this server, in seconds, in
the body or as the header X-Request-Timeout. When it has passed, the request ends with an error, and
its group leaves the queue or the engine. Encoders accept a `timeout`, too.
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
    """The terms of one request.

    priority: lower numbers are served sooner. timeout_s: seconds from the end of the request's
    body; None for no limit.
    """

    priority: int = 0
    timeout_s: float | None = None


def take_terms(
    body: dict[str, Any],
    headers: Mapping[str, str],
    *,
    default_timeout_s: float | None,
    min_priority: int = SOONEST,
) -> Terms:
    """Read the terms of a request, and remove `timeout` from its body.

    Raises RequestError if a value is not allowed.

    default_timeout_s: used if the request has no timeout.
    min_priority: the lowest number, which is the most urgent, that the caller may send.
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
    """Remove `timeout` from a request's body, and return the request's timeout in seconds.

    It is the smaller one if both field and header are given, and the default if neither is. Raises
    RequestError.
    """
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
