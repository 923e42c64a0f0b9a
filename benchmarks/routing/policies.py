"""GroupRouter, and what it is compared with, in one router that is switched while it runs."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from deployments.routing.serve_routers import GroupRouter

POLICIES = ("round robin", "power of two choices", "ours")
POLICY_FILE = "CFG_SERVE_POLICY_FILE"
"""In the environment: the path of a file that names the policy."""


class SwitchRouter(GroupRouter):
    """Reads the policy's name for each request."""

    def initialize_state(self, **costs: float) -> None:
        super().initialize_state(**costs)
        self._turn = 0
        self._rng = random.Random(0)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        ours = await super().choose_replicas(candidate_replicas, pending_request)
        policy = _policy()
        if policy == "ours" or not candidate_replicas:
            return ours
        candidates = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id))
        self._turn += 1
        if policy == "round robin":
            first = candidates[self._turn % len(candidates)]
        else:
            two = self._rng.sample(candidates, min(2, len(candidates)))
            first = min(
                two, key=lambda replica: self.replica_queue_len_cache.get(replica.replica_id) or 0
            )
        return [[first], *([replica] for replica in candidates if replica is not first)]


def _policy() -> str:
    return Path(os.environ[POLICY_FILE]).read_text()
