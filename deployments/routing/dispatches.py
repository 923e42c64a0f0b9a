"""Which replica each call of this process went to, and how often for which reason.

Request routers call these functions in their own threads, and must not import the tables: Serve
pickles the classes of routers by value, with every object of their module.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from deployments.routing.placer import REASONS


class Dispatch:
    """Where a call went.

    replica: None until the call has one.
    reason: why this replica has it, one of placer.REASONS; None until it has taken the call.
    is_direct: whether the call went past Serve's handle.
    at: when the call was sent there, by time.monotonic.
    """

    def __init__(self) -> None:
        self.replica: Hashable | None = None
        self.reason: str | None = None
        self.is_direct = False
        self.at = math.inf


_lock = threading.Lock()
_expected: dict[str, Dispatch] = {}
_placements: Counter[str] = Counter()


@contextmanager
def expected(call_id: str) -> Iterator[Dispatch]:
    """Called by the ingress around a call of this id, to record where the call goes."""
    dispatch = Dispatch()
    with _lock:
        _expected[call_id] = dispatch
    try:
        yield dispatch
    finally:
        with _lock:
            _expected.pop(call_id, None)


def dispatched(call_id: str, replica: Hashable, reason: str | None = None) -> None:
    """Note the replica of a call: when it is sent there, and again when the replica has taken it.

    In between, the replica may refuse the call because it is full.

    reason: why the replica was chosen, once it has taken the call.
    """
    with _lock:
        if reason is not None:
            _placements[reason] += 1
        dispatch = _expected.get(call_id)
        if dispatch is not None:
            dispatch.replica, dispatch.at = replica, time.monotonic()
            dispatch.reason = reason


def placements() -> dict[str, int]:
    """How many calls replicas have taken, by the reason for which they were chosen."""
    with _lock:
        return {reason: _placements[reason] for reason in REASONS}
