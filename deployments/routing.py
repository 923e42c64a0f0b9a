"""Serve's request routers of this application: what an Embedder gets by tokens, a ModelReplica by prefixes and load.

Serve's own choice is the shorter of two queues, in requests; but requests differ a thousandfold in size, and in what
is cached of them where. Public API of Ray Serve 2.60 (`ray.serve.request_router`, alpha), but for PRIVATE.

A router lives where a handle is used, so in the ingress; Serve makes one for each handle, and calls all of its methods
from one event loop, which may have a thread of its own. Serve also pickles the class by value, and with it every
object of this module that it uses: there must be no state here outside the instances.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import dispatches, fleet, liveness
from deployments.placement import Costs, GroupRequest, Placer, group_request

PRIVATE = {
    "ray.serve.request_router:FIFOMixin": ("_get_pending_request_matching_metadata",),
    "ray.serve.request_router:RequestRouter": ("_get_pending_request_matching_internal_request_id",),
}
"""Names of Ray that are not public."""

QUEUED_TOKENS = "queued_tokens"
"""The key in what a replica's `record_routing_stats` returns."""


class TokenLedger:
    """Tokens of the requests that this router has sent and whose answers are not back yet, for each replica."""

    def __init__(self) -> None:
        self._tokens: dict[Any, dict[str, int]] = {}  # replica -> request -> tokens

    def sent(self, replica: Any, request: str, num_tokens: int) -> None:
        self._tokens.setdefault(replica, {})[request] = num_tokens

    def answered(self, replica: Any, request: str) -> None:
        """Also for a request that was never noted, or whose replica is gone."""
        requests = self._tokens.get(replica, {})
        requests.pop(request, None)
        if not requests:
            self.forget(replica)

    def forget(self, replica: Any) -> None:
        self._tokens.pop(replica, None)

    def load(self, replica: Any, reported_tokens: int) -> tuple[int, int]:
        """(tokens, requests) to compare replicas by. The report knows of other routers' requests too, and is old;
        what this router has sent is certain. So the larger counts, and requests decide between equals."""
        requests = self._tokens.get(replica, {})
        return max(reported_tokens, sum(requests.values())), len(requests)


class QueuedTokensRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by queued tokens: those they report, and between two reports those that were sent.

    Replicas that cannot take a request now are skipped by Serve.
    """

    def initialize_state(self) -> None:
        self._ledger = TokenLedger()
        self._deployment: str | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all replicas are offered at once
        return [[replica] for replica in sorted(candidate_replicas, key=self._load)]

    def _load(self, replica: RunningReplica) -> tuple[int, int]:
        """The number of ongoing requests, as last heard from the replica, decides between equals."""
        reported = int(replica.routing_stats.get(QUEUED_TOKENS, 0))
        tokens, requests = self._ledger.load(replica.replica_id, reported)
        return tokens, max(requests, self.replica_queue_len_cache.get(replica.replica_id) or 0)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when a replica starts, stops, or has something new to report. The ingress is told their number."""
        super().update_replicas(replicas)
        self._deployment = next((r.replica_id.deployment_id.name for r in replicas), self._deployment)
        if self._deployment is not None:
            fleet.publish(self._deployment, [fleet.ReplicaLoad() for _ in replicas], -math.inf)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        job = pending_request.args[0] if pending_request.args else None
        request = pending_request.metadata.internal_request_id
        self._ledger.sent(replica_id, request, getattr(job, "num_tokens", 1))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ledger.answered(replica_id, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._ledger.forget(replica_id)


# --- ModelReplica ---------------------------------------------------------------------------------

GENERATE = "generate"
"""The method of ModelReplica whose calls carry a group: (endpoint, body, guidance, headers, call)."""

_MAX_READ = 1024


class GroupRouter(FIFOMixin, RequestRouter):
    """Ranks the replicas for a whole group, by `placement.choose`; other calls go where the fewest streams are.

    Replicas report the keys `fleet.REPORTED`, and REPORTED_AT, by `record_routing_stats`. Each request goes to the
    replica that was chosen for it, and not, as FIFOMixin alone would have it, to one that was chosen for a later one.
    """

    def initialize_state(self, **costs: float) -> None:
        """costs: the fields of `placement.Costs`, from `request_router_kwargs`."""
        self._placer = Placer(Costs(**costs))
        self._read: OrderedDict[str, GroupRequest] = OrderedDict()  # those on their way, by internal request id
        self._deployment: str | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called for each request, and again after a pause while all replicas are full. All are ranked: Serve goes
        on to the next if one cannot take a request now."""
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        by_id = {replica_id: candidates[replica_id] for replica_id in dispatches.usable(candidates)}
        group = self._group(pending_request)
        if pending_request is None or group is None:
            ranked = self._placer.least_loaded(by_id, time.monotonic())
        else:
            name = pending_request.metadata.internal_request_id
            ranked = self._placer.rank(name, group, by_id, time.monotonic())
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all replicas are offered at once
        if pending_request is not None and group is not None and ranked:
            dispatches.dispatched(pending_request.args[4], ranked[0])
        return [[by_id[replica_id]] for replica_id in ranked]

    def _group(self, pending_request: PendingRequest | None) -> GroupRequest | None:
        """What the request asks for, read once; None for other calls than GENERATE."""
        if pending_request is None or pending_request.metadata.call_method != GENERATE:
            return None
        name = pending_request.metadata.internal_request_id
        if name not in self._read:
            self._read[name] = group_request(*pending_request.args[:4])
            if len(self._read) > _MAX_READ:  # left by clients that did not wait
                self._read.popitem(last=False)
        return self._read[name]

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """Called by FIFOMixin when a replica is free for the request of this metadata. None: the first in line gets
        it, which happens only to calls that share their id with another one."""
        return self._get_pending_request_matching_internal_request_id(request_metadata)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called when the replica has taken the request."""
        if group := self._group(pending_request):
            dispatches.dispatched(pending_request.args[4], replica_id)
            self._placer.sent(pending_request.metadata.internal_request_id, group, replica_id, time.monotonic())
            self._publish()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called when an answer ends, in whatever way, and when a replica refuses the request as it is full."""
        self._placer.answered(internal_request_id, replica_id, time.monotonic())
        if self._read.pop(internal_request_id, None):
            self._publish()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when a replica starts, stops, or has something new to report."""
        self._placer.keep_only([replica.replica_id for replica in replicas])
        for replica in replicas:
            stats = replica.routing_stats or {}
            age_s = fleet.report_age_s(stats, time.time())
            self._placer.report(replica.replica_id, stats, time.monotonic(), age_s)
            self._deployment = replica.replica_id.deployment_id.name
        liveness.lookout.watch(liveness.beacons({r.replica_id: r.routing_stats or {} for r in replicas}))
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called when a call finds its replica dead, before the controller does."""
        super().on_replica_actor_died(replica_id)
        self._placer.forget(replica_id)
        self._publish()

    def _publish(self) -> None:
        """Tell the ingress. Before the first replica there is nothing to tell."""
        if self._deployment is not None:
            replicas = self.curr_replicas
            loads = self._placer.loads(replicas, time.monotonic())
            fleet.publish(self._deployment, loads.values(), self._placer.reported_at(replicas))
