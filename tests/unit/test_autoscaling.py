"""The number of replicas, from what they report. No Serve."""

from types import SimpleNamespace

import pytest

from deployments.autoscaling import KV_USE, STREAMS, GuidedLoad, report


def context(streams=(), kv_use=(), queued=0.0, running=None):
    names = [f"replica{i}" for i in range(max(len(streams), len(kv_use)))]
    metrics = {
        STREAMS: dict(zip(names, streams, strict=False)),
        KV_USE: dict(zip(names, kv_use, strict=False)),
    }
    running = names if running is None else running
    return SimpleNamespace(
        aggregated_metrics=metrics, running_replicas=running, total_queued_requests=queued
    )


@pytest.mark.parametrize(
    ("ctx", "replicas"),
    [
        (context([64, 64], [0.1, 0.1]), 2),
        (context([64, 64], [0.8, 0.8]), 2),
        (context([160, 96]), 4),
        (context([10, 10], [0.9, 0.9]), 1.8 / 0.8),
        (context([0, 0], [0, 0]), 0),
        (context([64], queued=32), 2),
        (context([64, 64, 64], running=["replica0"]), 1),
        (
            SimpleNamespace(
                aggregated_metrics=None, running_replicas=[], total_queued_requests=None
            ),
            0,
        ),
    ],
)
def test_replicas_for_streams_and_blocks(ctx, replicas):
    assert GuidedLoad(target_streams=64, target_kv_use=0.8)(ctx) == (pytest.approx(replicas), {})


def test_a_report_counts_both_streams_and_the_held_share():
    assert report({"running": 6, "waiting": 2, "free_blocks": 25, "total_blocks": 100}) == {
        STREAMS: 8,
        KV_USE: 0.75,
    }
    assert report({}) == {STREAMS: 0, KV_USE: 0}


@pytest.mark.parametrize(
    "kwargs", [{"target_streams": 0}, {"target_kv_use": 0}, {"target_kv_use": 1.5}]
)
def test_targets_that_make_no_sense_are_refused(kwargs):
    with pytest.raises(ValueError, match="policy_kwargs"):
        GuidedLoad(**kwargs)
