"""Which replica each call of this process went to, and which replicas have lately fallen silent or said that they die.

Serve's router knows the first and tells nobody; the ingress finds out the second. Both live in one process, the router
in a thread of its own. Call the functions; never import the tables (see fleet.py for why they are not in routing.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

R = TypeVar("R", bound=Hashable)

SUSPECT_S = 60.0
"""How long a replica that fell silent gets nothing while there is another. Serve's own health checks decide about it
meanwhile."""


LOST_S = 10.0
"""How long a replica whose engine is dead gets nothing. It leaves within a second, and answers until then."""


class Dispatch:
    """Where a call went. replica: None while there is none for it. at: when it was sent there, by time.monotonic."""

    def __init__(self) -> None:
        self.replica: Hashable | None = None
        self.at = math.inf


_lock = threading.Lock()
_calls: dict[str, Dispatch] = {}
_suspects: dict[Hashable, float] = {}
_lost: dict[Hashable, float] = {}


@contextmanager
def expected(call: str) -> Iterator[Dispatch]:
    """Called by the ingress around a call of this id."""
    dispatch = Dispatch()
    with _lock:
        _calls[call] = dispatch
    try:
        yield dispatch
    finally:
        with _lock:
            _calls.pop(call, None)


def dispatched(call: str, replica: Hashable) -> None:
    """Called by GroupRouter, in its thread, when it sends the call to a replica (which may yet refuse, being full),
    and when the replica has taken it."""
    with _lock:
        dispatch = _calls.get(call)
        if dispatch is not None:
            dispatch.replica, dispatch.at = replica, time.monotonic()


def suspect(replica: Hashable | None) -> None:
    """Called by the ingress: the replica did not answer, or fell silent. None: nobody knows which."""
    _note(_suspects, replica, SUSPECT_S)


def lost(replica: Hashable | None) -> None:
    """Called by the ingress: the replica said that its engine is dead, or Ray did. None: nobody knows which."""
    _note(_lost, replica, LOST_S)


def usable(replicas: Iterable[R]) -> list[R]:
    """Those of `replicas` that may get a call now: none that is lost, for its successor comes; a suspect only if there
    is no other. Called by GroupRouter."""
    lost, suspects = _present(_lost), _present(_suspects)
    alive = [replica for replica in replicas if replica not in lost]
    return [replica for replica in alive if replica not in suspects] or alive


def _note(table: dict[Hashable, float], replica: Hashable | None, for_s: float) -> None:
    if replica is not None:
        with _lock:
            table[replica] = time.monotonic() + for_s


def _present(table: dict[Hashable, float]) -> frozenset[Hashable]:
    now = time.monotonic()
    with _lock:
        for replica in [replica for replica, until in table.items() if until <= now]:
            del table[replica]
        return frozenset(table)
