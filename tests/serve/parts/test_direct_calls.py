"""Direct calls: when there are none, and that a replica which stops loses none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from deployments.autoscaling import GuidedLoad
from deployments.generator.replica import reason_against, start_listener
from tools.serving.process import REPOSITORY

pytestmark = pytest.mark.slow

START_LIMIT_S = 120


def test_a_replica_that_stops_first_answers_its_direct_calls() -> None:
    """Serve waits for the replica's `__del__`, although it has no call of Serve's any more."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.serve.parts.stopping_app"],
        cwd=REPOSITORY,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].split() == [str(n) for n in range(30)]


def test_a_replica_that_cannot_listen_serves_without_direct_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node's address may be one that only other machines can use, behind NAT."""
    deployment = SimpleNamespace(autoscaling_config=None, max_ongoing_requests=8)
    context = SimpleNamespace(_deployment_config=deployment)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    answer: Any = None
    elsewhere = "203.0.113.1"  # RFC 5737: nobody has it
    assert asyncio.run(start_listener(elsewhere, answer, wanted=True)) is None
    assert asyncio.run(start_listener("127.0.0.1", answer, wanted=False)) is None
    listener = asyncio.run(start_listener("127.0.0.1", answer, wanted=True))
    assert listener is not None
    listener.close()


@pytest.mark.parametrize(
    ("policy", "env", "words"),
    [
        (None, {}, None),
        (None, {"RAY_USE_TLS": "0"}, None),
        (None, {"RAY_USE_TLS": "1"}, "RAY_USE_TLS"),
        (f"deployments.autoscaling:{GuidedLoad.__name__}", {}, None),
        (GuidedLoad, {}, None),
        ("ray.serve.autoscaling_policy:default_autoscaling_policy", {}, "counts requests"),
        ("default", {}, "counts requests"),
    ],
)
def test_when_a_replica_takes_no_direct_calls(
    policy: object, env: dict[str, str], words: str | None
) -> None:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    autoscaling = None
    if policy == "default":
        autoscaling = AutoscalingConfig()
    elif policy is not None:
        chosen = AutoscalingPolicy(policy_function=policy)  # type: ignore[no-untyped-call]
        autoscaling = AutoscalingConfig(policy=chosen)
    reason = reason_against(autoscaling, env)
    assert (reason is None) if words is None else (reason and words in reason)
