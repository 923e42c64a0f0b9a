"""Which replica of one deployment gets each call, for all who send calls from this process.

Calls go to replicas in two ways: through Serve's handle, where GroupRouter asks here, and directly
(replica_client/direct_calls.py). Both must know of what the other has sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from deployments.direct.address import Address, address_in
from deployments.health.replica_health import Failure, health
from deployments.messages import GenerateCall
from deployments.requests.group import GroupRequest
from deployments.routing.dispatches import dispatched
from deployments.routing.fleets import Fleet, generator_fleet
from deployments.routing.loads import report_age_s
from deployments.routing.placement import Costs
from deployments.routing.placer import Placer

R = TypeVar("R", bound=Hashable)

MODEL = "model_fingerprint"
"""Key in a replica's report: the fingerprint of what it computes with."""


class CallPlacer:
    """A Placer that several threads may use, with the addresses of the replicas.

    costs: the fields of `placement.Costs`.

    The name of a call differs for each try: its `call_id` for direct calls, and Serve's
    `internal_request_id` for the others.
    """

    def __init__(self, **costs: float) -> None:
        self._lock = threading.Lock()
        self._placer = Placer(Costs(**costs))
        self._fleet: Fleet | None = None  # None until there has been a replica
        self._addresses: dict[Hashable, Address | None] = {}
        self._models: dict[Hashable, object] = {}  # their fingerprints; None: not told yet

    def rank(self, name: str, call: GenerateCall, among: Iterable[R]) -> list[R]:
        """Those of the replicas `among` that may get this call, the best first.

        From now on, the call counts as load of the first replica. A stream that was begun elsewhere
        gets a replica with the same model. Only if there is none, it gets another, which refuses.
        """
        usable = health().usable(among)
        with self._lock:
            if call.begun is not None:
                usable = [r for r in usable if self._has(r, call.begun.model)] or usable
            ranked = self._placer.rank(name, call.group, usable, time.monotonic())
        if ranked:
            dispatched(call.call_id, ranked[0])
        return ranked

    def least_loaded(self, among: Iterable[R]) -> list[R]:
        """The same for a call that computes nothing, the replica with the fewest streams first."""
        with self._lock:
            return self._placer.least_loaded(health().usable(among), time.monotonic())

    def can_place(self, model: str) -> bool:
        """Whether a replica with this model is known that has not failed."""
        return bool(self._running(model))

    def awaits_report(self) -> bool:
        """Whether a replica has started that has not told its model yet, and has not failed."""
        with self._lock:
            untold = [replica for replica, model in self._models.items() if model is None]
        return any(health().why(replica) is None for replica in untold)

    def has_room(self, group: GroupRequest, model: str) -> bool:
        """Whether a replica that can place it, and does not leave, has room for a group now."""
        running, now = self._running(model), time.monotonic()
        staying = [replica for replica in running if not health().is_leaving(replica)]
        with self._lock:
            return any(self._placer.has_room(group, replica, now) for replica in staying)

    def _running(self, model: str) -> list[Hashable]:
        with self._lock:
            replicas = [replica for replica in self._addresses if self._has(replica, model)]
        return [replica for replica in replicas if health().why(replica) is None]

    def _has(self, replica: Hashable, model: str) -> bool:
        return (self._models.get(replica) or "") == model

    def direct(self, call: GenerateCall) -> tuple[Hashable, Address] | None:
        """The best replica for a direct call, and its address; the call is planned there.

        None if no replica is known, or if the best one takes no direct calls.
        """
        with self._lock:
            addresses = dict(self._addresses)
        if not any(addresses.values()):
            return None
        ranked = self.rank(call.call_id, call, addresses)
        if not ranked:
            return None
        address = addresses[ranked[0]]
        if address is None:
            self.answered(call.call_id, ranked[0])
            return None
        return ranked[0], address

    def sent(self, name: str, call: GenerateCall, replica: Hashable) -> None:
        with self._lock:
            reason = self._placer.sent(name, call.group, replica, time.monotonic())
        dispatched(call.call_id, replica, reason)

    def answered(self, name: str, replica: Hashable) -> None:
        """Note that the call has ended, however it did, or that it is not sent there after all."""
        with self._lock:
            self._placer.answered(name, replica, time.monotonic())

    def update(self, deployment: str | None, reports: Mapping[Any, Mapping[str, Any]]) -> None:
        """Note which replicas run, and what they last reported.

        deployment: the name of their deployment; None if there is no replica to tell it.
        """
        now, unix_time_s = time.monotonic(), time.time()
        with self._lock:
            self._placer.keep_only(list(reports))
            for replica, stats in reports.items():
                self._placer.report(replica, stats, now, report_age_s(stats, unix_time_s))
            self._addresses = {r: address_in(stats) for r, stats in reports.items()}
            self._models = {r: stats.get(MODEL) for r, stats in reports.items()}
        if deployment is not None:
            self._fleet = generator_fleet(deployment)
            _placers[deployment] = self
        if self._fleet is not None:
            self._fleet.counts.update(reports)
        self._publish()

    def died(self, replica: Hashable) -> None:
        """Note that a call found the replica dead. The controller may not know it yet."""
        health().failed(replica, Failure.DEAD)
        with self._lock:
            self._placer.forget(replica)
            self._addresses.pop(replica, None)
            self._models.pop(replica, None)
        if self._fleet is not None:
            self._fleet.counts.left(replica)
        self._publish()

    def _publish(self) -> None:
        """Tell the ingress of the replicas, once there has been one."""
        if self._fleet is not None:
            with self._lock:
                replicas = list(self._addresses)
                reports = self._placer.reports(replicas)
                reported_at = self._placer.reported_at(replicas)
            self._fleet.update(reports, reported_at)


_placers: dict[str, CallPlacer] = {}


def can_go_on(deployment: str, model: str) -> bool:
    """Whether a replica of `deployment` can go on with what was begun with this model."""
    placer = placer_of(deployment)
    return placer is not None and placer.can_place(model)


def placer_of(deployment: str) -> CallPlacer | None:
    """Who places the calls of a deployment; None if none of its replicas is known yet."""
    return _placers.get(deployment)
