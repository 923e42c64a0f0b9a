"""What replicas report for /metrics alone: numbers of now, and totals since a replica's start.

Nothing is decided by them. `loads.py` has the numbers by which replicas are chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_GONE = 1000
"""How many replicas that left are remembered one by one; of older ones, only a sum is kept.

Should one of those come back, it would be counted twice.
"""


@dataclass(frozen=True)
class ReportKeys:
    """The keys of a replica's report. All values are integers.

    now: what is true now; the numbers of a replica that left are gone.
    totals: counts since the replica's start.
    """

    now: tuple[str, ...]
    totals: tuple[str, ...]


GENERATOR = ReportKeys(
    now=(
        "running",
        "waiting",
        "queued_prefill_tokens",
        "total_blocks",
        "free_blocks",
        "leader_blocks",
        "follower_blocks",
        "groups",
        "guided_streams",
        "held_streams",
    ),
    totals=(
        "groups_admitted",
        "joint_steps",
        "solo_rows",
        "recomputed_streams",
        "group_preemptions",
        "guided_tokens",
        "full_strength_tokens",
        "gate_closed_tokens",
        "gate_probes",
        "gate_saved_tokens",
        "scored_tokens",
        "windows_opened",
        "windows_closed",
        "guided_drafts",
        "guided_drafts_accepted",
        "plain_drafts",
        "plain_drafts_accepted",
        "held_ms",
    ),
)
"""Of an engine's `guidance_stats`. The drafts are missing in engines without speculation."""

ENCODER = ReportKeys(
    now=("queued_sequences", "queued_tokens", "batches_in_flight"),
    totals=("requests", "sequences", "tokens", "batches"),
)
"""Of an encoder replica's `record_routing_stats`."""


class ReplicaCounts:
    """The counts of one deployment, for several threads. Totals never fall when replicas leave."""

    def __init__(self, names: ReportKeys) -> None:
        self._names = names
        self._lock = threading.Lock()
        # replica -> its last report; those that left come first, the longest gone before the others
        self._reports: dict[Hashable, Mapping[str, Any]] = {}
        self._present: frozenset[Hashable] = frozenset()
        self._older = dict.fromkeys(names.totals, 0)  # of the replicas that are not in `_reports`

    def update(self, reports: Mapping[Any, Mapping[str, Any]]) -> None:
        """Note which replicas run, and what they last reported; {}: nothing yet."""
        with self._lock:
            for replica, report in reports.items():
                known = self._reports.pop(replica, {})
                self._reports[replica] = report or known
            self._present = frozenset(reports)
            self._fold()

    def left(self, replica: Hashable) -> None:
        """Note that a replica is dead."""
        with self._lock:
            self._present -= {replica}

    def _fold(self) -> None:
        too_many = max(0, len(self._reports) - len(self._present) - MAX_GONE)
        for replica in list(self._reports)[:too_many]:
            report = self._reports.pop(replica)
            for name in self._names.totals:
                self._older[name] += count(report.get(name))

    def now(self) -> dict[str, dict[str, int]]:
        """For each name of `now`: the numbers of the replicas that have reported, by replica."""
        with self._lock:
            reports = {name_of(r): self._reports[r] for r in self._present if self._reports[r]}
        return {
            name: {replica: count(report.get(name)) for replica, report in reports.items()}
            for name in self._names.now
        }

    def totals(self) -> dict[str, int]:
        """Sums over all replicas that have ever reported to this process."""
        with self._lock:
            reports = list(self._reports.values())
            return {
                name: self._older[name] + sum(count(report.get(name)) for report in reports)
                for name in self._names.totals
            }


def count(value: object) -> int:
    """`value` if it is a count, else 0."""
    return value if type(value) is int and value > 0 else 0


def name_of(replica: Hashable) -> str:
    """The name of a replica for people: for Serve's ReplicaID its unique part."""
    return str(getattr(replica, "unique_id", replica))


_METRICS = {
    "running": "streams_running",
    "waiting": "streams_waiting",
    "total_blocks": "kv_blocks",
    "free_blocks": "kv_blocks_free",
}


def generator_metrics(
    now: Mapping[str, Mapping[str, int]], totals: Mapping[str, int]
) -> dict[str, float | Mapping[str, float]]:
    """The counts of a generator, by the names of the metrics (ingress/metric_families.py).

    now: by name and replica.
    """
    counted = dict(totals)
    drafts, accepted = (
        {kind: counted.pop(f"{kind}_{what}") for kind in ("guided", "plain")}
        for what in ("drafts", "drafts_accepted")
    )
    return {
        **{_METRICS.get(name, name): values for name, values in now.items()},
        "engines_held_seconds": counted.pop("held_ms") / 1000,
        "drafts": drafts,
        "drafts_accepted": accepted,
        **counted,
    }
