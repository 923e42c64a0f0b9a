"""What this process knows of the replicas of each deployment: written by its request routers.

The ingress reads it. A router may have a thread of its own, and Serve pickles its class by value,
with every object of its module. So the routers call functions of this module, and must not import
its table.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from deployments.routing.counts import ENCODER, GENERATOR, ReplicaCounts, ReportKeys
from deployments.routing.loads import ReplicaLoad


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """The running replicas of one deployment, by their last reports.

    reporting: replicas that have reported their KV blocks.
    max_num_seqs: the sum of all replicas. max_model_len: the same for all; 0 if it is not known.
    reported_at: when the oldest report was true, by time.monotonic; -inf if a replica has not
    reported.
    """

    replicas: int = 0
    reporting: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    reported_at: float = -math.inf

    @property
    def report_age_s(self) -> float:
        """Age of the oldest report; inf if a replica has not reported."""
        return time.monotonic() - self.reported_at


class Fleet:
    """The replicas of one deployment. Several threads may use it.

    view: replaced as a whole.
    is_known: whether a request router has ever told of a replica.
    counts: for /metrics.
    """

    def __init__(self, names: ReportKeys) -> None:
        self.view, self.is_known = FleetView(), False
        self.counts = ReplicaCounts(names)

    def update(self, loads: Collection[ReplicaLoad], reported_at: float = -math.inf) -> None:
        """Note which replicas run. Called by a request router, in its thread.

        reported_at: see FleetView.
        """
        self.view = FleetView(
            replicas=len(loads),
            reporting=sum(load.total_blocks > 0 for load in loads),
            max_num_seqs=sum(load.max_num_seqs for load in loads),
            max_model_len=max((load.max_model_len for load in loads), default=0),
            reported_at=reported_at,
        )
        self.is_known = True


_fleets: dict[str, Fleet] = {}
_lock = threading.Lock()


def generator_fleet(deployment: str) -> Fleet:
    """The replicas of a generator's deployment, of which nothing may be known yet."""
    return _fleet(deployment, GENERATOR)


def encoder_fleet(deployment: str) -> Fleet:
    """The same for an encoder's deployment."""
    return _fleet(deployment, ENCODER)


def _fleet(deployment: str, names: ReportKeys) -> Fleet:
    with _lock:
        return _fleets.setdefault(deployment, Fleet(names))
