"""What replicas report of themselves, by the names of the metrics."""

from __future__ import annotations

from collections.abc import Mapping

_NOW = {
    "running": "streams_running",
    "waiting": "streams_waiting",
    "total_blocks": "kv_blocks",
    "free_blocks": "kv_blocks_free",
}


def in_words(
    now: Mapping[str, Mapping[str, int]], totals: Mapping[str, int]
) -> dict[str, float | Mapping[str, float]]:
    """The counts of a generator (routing/counts.py), by the names of the metrics.

    now: by name and replica.
    """
    counted = dict(totals)
    drafts, accepted = (
        {kind: counted.pop(f"{kind}_{what}") for kind in ("guided", "plain")}
        for what in ("drafts", "drafts_accepted")
    )
    return {
        **{_NOW.get(name, name): values for name, values in now.items()},
        "engines_held_seconds": counted.pop("held_ms") / 1000,
        "drafts": drafts,
        "drafts_accepted": accepted,
        **counted,
    }
