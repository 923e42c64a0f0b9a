"""Serve stops a replica by the method that our patch wraps, and only then waits for requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private.replica import Replica, ReplicaActor

from cfg_core.patching import stock
from deployments import serve_patches
from deployments.generator.moving import drain
from deployments.generator.moving.drain import Drain, announced, follow


def test_a_drain_begins_before_serve_waits_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in serve_patches.PATCHES if row.by.endswith("drain:announced")]
    seen: list[str] = []

    class Watched(Drain):
        def begin(self) -> None:
            seen.append("told")
            super().begin()

    async def stop(replica: Any) -> None:
        seen.append("waits")

    async def main() -> None:
        replica: Any = object.__new__(Replica)
        replica._event_loop = asyncio.get_running_loop()
        replica._graceful_shutdown_task = None
        actor: Any = object.__new__(ReplicaActor)
        actor._replica_impl = replica
        await actor.perform_graceful_shutdown()
        await actor.perform_graceful_shutdown()

    monkeypatch.setattr(drain, "_drains", [])
    follow(Watched(0.0))
    monkeypatch.setattr(Replica, "perform_graceful_shutdown", announced(stock(row)))
    monkeypatch.setattr(Replica, "_perform_graceful_shutdown", stop)
    asyncio.run(main())
    assert seen == ["told", "waits", "told"]
