"""Autoscaling policy for ModelReplica, by the number of streams and the use of the KV pool.

Serve's own policy counts requests. But a guided request has two streams or more, `n` and lists of
prompts make more, and a few long texts can fill a KV pool that hundreds of short ones would not
fill. This module uses only the public API of Ray Serve 2.60. In a Serve config:

    autoscaling_config:
      policy:
        policy_function: deployments.autoscaling:GuidedLoad
        policy_kwargs: {target_streams: 96, target_kv_use: 0.8}

Serve still applies its own delays, bounds and smoothing (`upscale_delay_s`, `max_replicas`, ...).
Replicas report through `record_autoscaling_stats`. A request that still waits in front of the
replicas is counted as two streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

STREAMS = "streams"
"""Key in a replica's report: the number of its streams, running and waiting."""
KV_USE = "kv_use"
"""Key in a replica's report: the share of its KV blocks that is in use, 0 to 1."""

STREAMS_OF_A_QUEUED_REQUEST = 2


class GuidedLoad:
    """An autoscaling policy for Serve: keeps replicas near a number of streams and a KV use.

    target_streams: streams that one replica should have, running and waiting. Set it to
    `max_num_seqs` or a little less.

    target_kv_use: share of a replica's KV blocks that should be in use, 0 to 1.
    """

    def __init__(self, target_streams: float = 64, target_kv_use: float = 0.8) -> None:
        if not target_streams > 0 or not 0 < target_kv_use <= 1:
            raise ValueError(
                "policy_kwargs: target_streams must be above 0, target_kv_use above 0 and at"
                " most 1."
            )
        self.target_streams, self.target_kv_use = target_streams, target_kv_use

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, and an empty dict: the policy keeps no state.

        Serve's controller calls this with an AutoscalingContext.
        """
        reported = ctx.aggregated_metrics or {}
        running = set(ctx.running_replicas)
        streams, kv_use = (
            _of_running(reported.get(key) or {}, running) for key in (STREAMS, KV_USE)
        )
        return self.desired(streams, kv_use, ctx.total_queued_requests or 0.0), {}

    def desired(
        self, streams: Iterable[float], kv_use: Iterable[float], queued_requests: float
    ) -> float:
        """The wanted number of replicas, not rounded.

        streams, kv_use: the reports of the running replicas. queued_requests: requests that wait in
        front of them.
        """
        by_streams = (
            sum(streams) + STREAMS_OF_A_QUEUED_REQUEST * queued_requests
        ) / self.target_streams
        by_blocks = sum(kv_use) / self.target_kv_use
        return max(by_streams, by_blocks)


def _of_running(reported: Mapping[Any, float], running: set[Any]) -> list[float]:
    return [value for replica, value in reported.items() if replica in running]


def report(stats: Mapping[str, int]) -> dict[str, float]:
    """A replica's report to Serve, made from its engine's `guidance_stats`."""
    total = stats.get("total_blocks", 0)
    held = total - stats.get("free_blocks", total)
    return {
        STREAMS: float(stats.get("running", 0) + stats.get("waiting", 0)),
        KV_USE: held / total if total else 0.0,
    }
