"""Which replicas may get calls, and why another may not: the only place of a process that says so.

Whoever notices something of a replica tells it here:

- Serve's router: the reports, which say where the beacons are, and replicas found dead.
- The answer to a call (replica_client/answers.py): an engine that is dead, a call that is lost.
- The chunks of a stream, in the same place: that its replica is to stop.
- A connection for direct calls (direct/connections.py): whether it could be made.

Whoever chooses or waits asks here: the router for `usable` replicas, a connection whether it may be
tried, and the answer to a call whether its replica `is_silent`. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from deployments.health.beacon import beacons
from deployments.health.beacon_monitor import BeaconMonitor

R = TypeVar("R", bound=Hashable)


class Failure(StrEnum):
    """What is wrong with a replica, and what follows.

    SILENT: it gave no sign of life. It gets nothing while there is another one.
    DEAD: its process or its engine is gone. It gets nothing at all: another one will replace it.
    UNREACHABLE: it cannot be connected to. It gets calls through Serve's handle alone.
    """

    SILENT = "silent"
    DEAD = "dead"
    UNREACHABLE = "unreachable"


COUNTS_FOR_S = {Failure.SILENT: 60.0, Failure.DEAD: 10.0, Failure.UNREACHABLE: 30.0}
"""Seconds for which a failure counts.

Meanwhile Serve's own health checks decide about a silent replica. The process of a dead engine
exits within a second, and answers until then.
"""

LEAVES_FOR_S = 60.0
"""Seconds for which it counts that a replica leaves. By then the controller has taken it off the
list, or the next chunk of one of its streams says it again."""

COUNTED = (Failure.SILENT, Failure.DEAD)
"""The failures of which /metrics tells."""


class ReplicaHealth:
    """What is known of the health of all replicas. Several threads may use it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        # replica -> failure -> until when it counts
        self._failing: defaultdict[Hashable, dict[Failure, float]] = defaultdict(dict)
        self._leaving: dict[Hashable, float] = {}  # until when it counts
        self._times: Counter[Failure] = Counter()
        self._reports: dict[str, Mapping[Any, Mapping[str, Any]]] = {}  # by deployment
        self._monitor = BeaconMonitor()

    # --- what is heard ----------------------------------------------------------------------------

    def reported(self, deployment: str, reports: Mapping[Any, Mapping[str, Any]]) -> None:
        """Note which replicas of a deployment run, and what they reported.

        Their beacons are asked from now on.
        """
        with self._lock:
            self._reports[deployment] = reports
            running = {r: told for group in self._reports.values() for r, told in group.items()}
            self._monitor.watch(beacons(running))
            for replica in self._failing.keys() - running.keys():
                if not any(self._is_failing(replica, failure) for failure in Failure):
                    del self._failing[replica]

    def failed(self, replica: Hashable | None, failure: Failure) -> None:
        """Note a failure of a replica; None: of an unknown one, which changes nothing."""
        if replica is not None:
            with self._lock:
                # Several calls may tell of the same failure.
                self._times[failure] += not self._is_failing(replica, failure)
                self._failing[replica][failure] = self._now() + COUNTS_FOR_S[failure]

    def leaves(self, replica: Hashable | None) -> None:
        """Note that a replica is to stop, which is no failure; None: an unknown one."""
        if replica is not None:
            with self._lock:
                now = self._now()
                self._leaving = {r: until for r, until in self._leaving.items() if until > now}
                self._leaving[replica] = now + LEAVES_FOR_S

    def connected(self, replica: Hashable) -> None:
        """Note that a connection could be made."""
        with self._lock:
            self._failing.get(replica, {}).pop(Failure.UNREACHABLE, None)

    # --- what is answered -------------------------------------------------------------------------

    def usable(self, replicas: Iterable[R]) -> list[R]:
        """Those of `replicas` that may get a call now.

        One that leaves is among them only if all others are dead or silent, and a silent one only
        if there is no other.
        """
        why = {replica: self.why(replica) for replica in list(self._failing)}
        alive = [replica for replica in replicas if why.get(replica) is not Failure.DEAD]
        well = [replica for replica in alive if why.get(replica) is None]
        return [replica for replica in well if not self.is_leaving(replica)] or well or alive

    def is_leaving(self, replica: Hashable) -> bool:
        return self._leaving.get(replica, -math.inf) > self._now()

    def why(self, replica: Hashable) -> Failure | None:
        """Why a replica should get no call now, DEAD or SILENT; None if it may get some."""
        for failure in (Failure.DEAD, Failure.SILENT):
            if self._is_failing(replica, failure):
                return failure
        return None

    def may_connect(self, replica: Hashable) -> bool:
        """Whether a connection to the replica may be tried now.

        When UNREACHABLE counts no more, one call may try, and the others wait for what it finds.
        """
        with self._lock:
            if self._is_failing(replica, Failure.UNREACHABLE):
                return False
            failing = self._failing.get(replica, {})
            if Failure.UNREACHABLE in failing:
                failing[Failure.UNREACHABLE] = self._now() + COUNTS_FOR_S[Failure.UNREACHABLE]
            return True

    def is_silent(self, replica: Hashable, heard_at: float, for_s: float) -> bool:
        """Whether neither the replica's beacon nor a call of it gave a sign for so many seconds.

        heard_at: when the call was heard last, by `now`.
        """
        return self._now() - heard_at > for_s and self._monitor.silent_s(replica) > for_s

    def failures(self) -> dict[str, int]:
        """How often a replica fell silent, and how often one was found dead."""
        with self._lock:
            return {str(failure): self._times[failure] for failure in COUNTED}

    def _is_failing(self, replica: Hashable, failure: Failure) -> bool:
        return self._failing.get(replica, {}).get(failure, -math.inf) > self._now()


_health = ReplicaHealth()


def health() -> ReplicaHealth:
    """That of this process: of the ingress, and of the request routers in it.

    Serve pickles the class of a request router by value, with every object of its module. So a
    router must call this function, and must not import the object.
    """
    return _health
