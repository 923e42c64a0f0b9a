"""The process-wide state of an ingress: all of it, with a reset for tests.

The ingress and its request routers live in one process. Serve may give a router a thread of its
own, and it pickles the router's class by value, with every object of the router's module. Therefore
the state that both use is here, behind functions and locks. Call the functions; never import the
tables.

- What the replicas of each deployment report (`publish`, `fleet`; for /metrics also
  `count_generator`, `count_encoder`, `placements`, `failures`).
- Who chooses a replica for each call (`placed_by`, `placer`).
- Which replica each call went to (`expected`, `dispatched`).
- Which replicas lately fell silent or said that their engine died (`suspect`, `lost`, `usable`).
- The thread that asks replicas for signs of life (`lookout`).
- What the HTTP guard enforces (`enforce`, `enforced`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from deployments.health.lookout import Lookout
from deployments.routing.counts import ENCODER, GENERATOR, Counts, Names
from deployments.routing.loads import REPORTED, ReplicaLoad

if TYPE_CHECKING:
    from deployments.routing.call_placer import CallPlacer

R = TypeVar("R", bound=Hashable)

SUSPECT_S = 60.0
"""Seconds for which a replica that fell silent gets nothing while there is another one.

Meanwhile Serve's own health checks decide about it.
"""

LOST_S = 10.0
"""Seconds for which a replica whose engine is dead gets nothing.

Its process exits within a second, and answers until then.
"""


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """Sums over the running replicas of one deployment; fields as in ReplicaLoad.

    The values are those of the last report that this process got.

    max_model_len: not a sum; it is the same for all replicas.
    replicas: running.
    reporting: replicas that have reported their KV blocks.
    reported_at: when the oldest report was true, by time.monotonic; -inf if a replica has not
    reported.
    """

    replicas: int = 0
    reporting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    queued_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    held_ms: int = 0
    reported_at: float = -math.inf

    @property
    def report_age_s(self) -> float:
        """Age of the oldest report; inf if a replica has not reported."""
        return time.monotonic() - self.reported_at

    @classmethod
    def of(cls, loads: Collection[ReplicaLoad], reported_at: float) -> FleetView:
        """The sums over these replicas."""
        return cls(
            replicas=len(loads),
            reporting=sum(load.total_blocks > 0 for load in loads),
            reported_at=reported_at,
            max_model_len=max((load.max_model_len for load in loads), default=0),
            **{name: sum(getattr(load, name) for load in loads) for name in _SUMMED},
        )


_NOT_SUMMED = ("max_model_len",)
_SUMMED = tuple(
    f.name for f in fields(FleetView) if f.name in REPORTED and f.name not in _NOT_SUMMED
)


_NOTHING = FleetView()


class Dispatch:
    """Where a call went.

    replica: None until the call has one.
    reason: why this replica has it, one of placement.REASONS; None until it has taken the call.
    is_direct: whether the call went past Serve's handle.
    at: when the call was sent there, by time.monotonic.
    """

    def __init__(self) -> None:
        self.replica: Hashable | None = None
        self.reason: str | None = None
        self.is_direct = False
        self.at = math.inf


class _State:
    """Everything that this module keeps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fleets: dict[str, FleetView] = {}
        self.counts: dict[str, Counts] = {}
        self.placements: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.placers: dict[str, CallPlacer] = {}
        self.calls: dict[str, Dispatch] = {}
        self.suspects: dict[Hashable, float] = {}
        self.lost: dict[Hashable, float] = {}
        self.lookout = Lookout()
        self.policy: Any = None


_state = _State()


def reset() -> None:
    """For tests: forget everything."""
    global _state
    _state = _State()


# --- what replicas report -------------------------------------------------------------------------


def publish(deployment: str, loads: Collection[ReplicaLoad], reported_at: float) -> None:
    """Store the sums over the replicas of a deployment.

    Called by a request router, in its thread.

    reported_at: when the oldest report was true, by time.monotonic; -inf if a replica has not
    reported.
    """
    _state.fleets[deployment] = FleetView.of(loads, reported_at)


def fleet(deployment: str) -> FleetView:
    """The sums of a deployment as they were published last.

    Called by the ingress. A deployment of which nothing is known has no replicas.
    """
    return _state.fleets.get(deployment, _NOTHING)


def is_known(deployment: str) -> bool:
    """Whether a request router has ever told of a replica of this deployment."""
    return deployment in _state.fleets


def count_generator(deployment: str) -> Counts:
    """The counts of a generator's replicas, for /metrics."""
    return _counts(deployment, GENERATOR)


def count_encoder(deployment: str) -> Counts:
    """The counts of an encoder's replicas, for /metrics."""
    return _counts(deployment, ENCODER)


def _counts(deployment: str, names: Names) -> Counts:
    with _state.lock:
        return _state.counts.setdefault(deployment, Counts(names))


# --- where calls go -------------------------------------------------------------------------------


def placed_by(deployment: str, placer: CallPlacer) -> None:
    """Note who places the calls of a deployment. Called by a request router, in its thread."""
    _state.placers[deployment] = placer


def placer(deployment: str) -> CallPlacer | None:
    """Who places the calls of a deployment; None if none of its replicas is known yet."""
    return _state.placers.get(deployment)


# --- which replica has a call ---------------------------------------------------------------------


@contextmanager
def expected(call_id: str) -> Iterator[Dispatch]:
    """Called by the ingress around a call of this id, to record where the call goes."""
    dispatch = Dispatch()
    with _state.lock:
        _state.calls[call_id] = dispatch
    try:
        yield dispatch
    finally:
        with _state.lock:
            _state.calls.pop(call_id, None)


def dispatched(call_id: str, replica: Hashable, reason: str | None = None) -> None:
    """Note the replica of a call.

    Called by a request router when it sends the call to a replica, and when the replica has taken
    it. In between, the replica may refuse the call because it is full.

    reason: why the replica was chosen, once it has taken the call.
    """
    with _state.lock:
        if reason is not None:
            _state.placements[reason] += 1
        dispatch = _state.calls.get(call_id)
        if dispatch is not None:
            dispatch.replica, dispatch.at = replica, time.monotonic()
            dispatch.reason = reason


def placements() -> dict[str, int]:
    """How many calls replicas have taken, by the reason for which they were chosen."""
    with _state.lock:
        return dict(_state.placements)


# --- which replicas may get calls -----------------------------------------------------------------


def suspect(replica: Hashable | None) -> None:
    """Note that a replica (None: unknown which) fell silent; called by the ingress."""
    _note(_state.suspects, replica, SUSPECT_S, "silent")


def lost(replica: Hashable | None) -> None:
    """Note that the engine of a replica (None: unknown which) is dead; called by the ingress."""
    _note(_state.lost, replica, LOST_S, "dead")


FAILURES = ("silent", "dead")


def failures() -> dict[str, int]:
    """How often a replica fell silent, and how often one was found dead."""
    with _state.lock:
        return {kind: _state.failures[kind] for kind in FAILURES}


def usable(replicas: Iterable[R]) -> list[R]:
    """Those of `replicas` that may get a call now.

    Called by a request router. A lost replica is never among them, because another one will replace
    it. A suspect is among them only if there is no other.
    """
    gone, suspects = _present(_state.lost), _present(_state.suspects)
    alive = [replica for replica in replicas if replica not in gone]
    return [replica for replica in alive if replica not in suspects] or alive


def _note(table: dict[Hashable, float], replica: Hashable | None, for_s: float, kind: str) -> None:
    if replica is not None:
        with _state.lock:
            now = time.monotonic()
            _state.failures[kind] += table.get(replica, now) <= now  # once for all of its calls
            table[replica] = now + for_s


def _present(table: dict[Hashable, float]) -> frozenset[Hashable]:
    now = time.monotonic()
    with _state.lock:
        for replica in [replica for replica, until in table.items() if until <= now]:
            del table[replica]
        return frozenset(table)


# --- signs of life, and the guard -----------------------------------------------------------------


def lookout() -> Lookout:
    """The Lookout of this process."""
    return _state.lookout


def enforce(policy: Any) -> None:
    """Set the policy that the HTTP guard follows from now on (ingress/guard.py)."""
    _state.policy = policy


def enforced() -> Any:
    """What was passed to `enforce` last; None before."""
    return _state.policy
