"""Which Embedder replica gets a request: the one with the fewest tokens to compute.

Serve's own choice is the shorter of two queues, in requests. An encoder's requests differ a thousandfold in
size, so here the tokens count. Public API of Ray Serve 2.60 (`ray.serve.request_router`, alpha).
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

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

    Replicas that cannot take a request now are skipped by Serve, which calls this, all from one event loop.
    """

    def initialize_state(self) -> None:
        self._ledger = TokenLedger()

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

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        job = pending_request.args[0] if pending_request.args else None
        request = pending_request.metadata.internal_request_id
        self._ledger.sent(replica_id, request, getattr(job, "num_tokens", 1))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ledger.answered(replica_id, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._ledger.forget(replica_id)
