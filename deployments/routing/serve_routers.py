"""Ray Serve's request routers of this application.

An encoder replica is chosen by queued tokens, a generator replica by prefixes and load. Serve's own
policy takes the shorter of two queues, in requests, which differ a thousandfold in size. The
routers use the public API of Ray Serve 2.60
(`ray.serve.request_router`, alpha), except for the names in PRIVATE.

A router lives in the process that uses a handle, which is the ingress. Serve makes one router for
each handle, and calls all of its methods from one event loop, which may have a thread of its own.
Serve also pickles the class by value, with every object of this module that it uses. Therefore this
module must have no state outside the instances. What routers and the ingress share is behind
functions of other modules (fleets.py, dispatches.py, health/replica_health.py).
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from typing_extensions import override

from deployments.health.replica_health import health
from deployments.messages import GenerateCall
from deployments.routing.call_placer import CallPlacer
from deployments.routing.fleets import Fleet, encoder_fleet
from deployments.routing.loads import ReplicaLoad, SentLedger, Work

PRIVATE = {
    "ray.serve.request_router:FIFOMixin": ("_get_pending_request_matching_metadata",),
    "ray.serve.request_router:RequestRouter": (
        "_get_pending_request_matching_internal_request_id",
    ),
}
"""Names of Ray that are used here and are not public."""

QUEUED_TOKENS = "queued_tokens"
"""The key in what an encoder replica's `record_routing_stats` returns."""


class QueuedTokensRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by queued tokens: those they report, and those sent between two reports.

    Serve skips replicas that cannot take a request now.
    """

    @override
    def initialize_state(self, **_: Any) -> None:
        self._ledger = SentLedger()
        self._fleet: Fleet | None = None  # None until there has been a replica

    @override
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # All replicas are offered at once, so Serve must pause before it asks again.
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in sorted(candidate_replicas, key=self._load)]

    def _load(self, replica: RunningReplica) -> tuple[int, int]:
        """(tokens, requests), by which replicas are compared.

        The report includes the requests of other routers, but is old; what this router has sent is
        certain. So the larger number counts. Of equals, the one with fewer ongoing requests wins.
        """
        reported = int(replica.routing_stats.get(QUEUED_TOKENS, 0))
        tokens, requests = self._ledger.unanswered(replica.replica_id)
        ongoing = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(reported, tokens), max(requests, ongoing)

    @override
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._ledger.keep_only([replica.replica_id for replica in replicas])
        for replica in replicas:
            self._ledger.reported(replica.replica_id, time.monotonic())
        if (deployment := _deployment_of(replicas)) is not None:
            self._fleet = encoder_fleet(deployment)
        if self._fleet is not None:
            self._fleet.update([ReplicaLoad() for _ in replicas])
            self._fleet.counts.update(_reports_of(replicas))

    @override
    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        job = pending_request.args[0] if pending_request.args else None
        request = pending_request.metadata.internal_request_id
        self._ledger.sent(replica_id, request, Work(tokens=getattr(job, "num_tokens", 1)))

    @override
    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ledger.answered(replica_id, internal_request_id, time.monotonic())

    @override
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._ledger.forget(replica_id)


class GroupRouter(FIFOMixin, RequestRouter):
    """Ranks the replicas for a whole group, by `placement.choose`.

    Calls that carry no group go to the replica with the fewest streams. Replicas report the keys
    `loads.REPORTED`, and REPORTED_AT, by `record_routing_stats`. Each request goes to the replica
    that was chosen for it. With FIFOMixin alone, it could go to a replica that was chosen for a
    later request.
    """

    @override
    def initialize_state(self, **costs: float) -> None:
        """Called by Serve at the start.

        costs: the fields of `placement.Costs`, from `request_router_kwargs`.
        """
        self._placer = CallPlacer(**costs)
        self._deployment: str | None = None  # None until there has been a replica

    @override
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Called for each request, and again after a pause while all replicas are full.

        Returns all replicas, ranked. Serve goes on to the next if one cannot take a request now.
        """
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        call = _call(pending_request)
        if pending_request is None or call is None:
            ranked = self._placer.least_loaded(by_id)
        else:
            name = pending_request.metadata.internal_request_id
            ranked = self._placer.rank(name, call, by_id)
        if pending_request is not None:
            # All replicas are offered at once, so Serve must pause before it asks again.
            pending_request.routing_context.should_backoff = True
        return [[by_id[replica_id]] for replica_id in ranked]

    @override
    def _get_pending_request_matching_metadata(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        """Called by FIFOMixin when a replica is free for the request of this metadata.

        If this returns None, the first request in line gets the replica. That happens only to calls
        that share their id with another call.
        """
        return self._get_pending_request_matching_internal_request_id(request_metadata)

    @override
    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called when the replica has taken the request."""
        if (call := _call(pending_request)) is not None:
            self._placer.sent(pending_request.metadata.internal_request_id, call, replica_id)

    @override
    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called when an answer ends, however it does, and when a full replica refuses it."""
        self._placer.answered(internal_request_id, replica_id)

    @override
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when a replica starts, stops, or has something new to report."""
        reports = _reports_of(replicas)
        self._deployment = _deployment_of(replicas) or self._deployment
        if self._deployment is not None:
            health().reported(self._deployment, reports)
        super().update_replicas(replicas)
        self._placer.update(self._deployment, reports)

    @override
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called when a call finds its replica dead, before the controller does."""
        super().on_replica_actor_died(replica_id)
        self._placer.died(replica_id)


def _reports_of(replicas: list[RunningReplica]) -> dict[ReplicaID, dict[str, Any]]:
    return {replica.replica_id: replica.routing_stats or {} for replica in replicas}


def _deployment_of(replicas: list[RunningReplica]) -> str | None:
    """The name of their deployment; None if there is no replica."""
    return next((replica.replica_id.deployment_id.name for replica in replicas), None)


def _call(pending_request: PendingRequest | None) -> GenerateCall | None:
    """The call that carries a group; None for other calls."""
    argument = pending_request.args[0] if pending_request and pending_request.args else None
    return argument if isinstance(argument, GenerateCall) else None
