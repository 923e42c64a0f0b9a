"""The ingress's side of the signs of life: a thread that asks beacons and times their silence.

A replica that hangs, a node that died and a cut link look alike from the ingress: nothing arrives.
A replica whose event loop is busy looks the same, although it is well. Therefore this thread asks
the replica's beacon. A replica counts as silent only if its beacon was heard before. Where a
firewall closes the beacon's port, only Ray's own health checks find a hanging node. Time in which
the asking process itself did not run does not count. Standard library only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

from deployments.health.beacon import _ASK, ASK_EVERY_S


class BeaconMonitor:
    """A thread that asks beacons, and knows how long each has been silent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._time = 0.0  # seconds in which this thread ran
        self._heard: dict[Hashable, float] = {}  # when each was last heard, in that time
        self._asking: dict[Hashable, tuple[tuple[str, int], asyncio.Task[None]]] = {}

    def watch(self, beacons: Mapping[Any, tuple[str, int]]) -> None:
        """Ask these beacons (host and port, by replica) from now on; from any thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._run, args=(self._loop,), name="beacon-monitor", daemon=True
                ).start()
        self._loop.call_soon_threadsafe(self._follow, dict(beacons))

    def silent_s(self, replica: Hashable) -> float:
        """Seconds since this replica was last heard; 0 if it never was, or is not watched."""
        with self._lock:
            heard = self._heard.get(replica)
            return 0.0 if heard is None else self._time - heard

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._clock = loop.create_task(self._count_time())
        loop.run_forever()

    async def _count_time(self) -> None:
        """Count the time in which this thread runs.

        A tick that comes late counts as one tick, because the process was stopped or had no CPU.
        """
        while True:
            await asyncio.sleep(ASK_EVERY_S / 2)
            with self._lock:
                self._time += ASK_EVERY_S / 2

    def _follow(self, beacons: dict[Hashable, tuple[str, int]]) -> None:
        for replica in [r for r, (address, _) in self._asking.items() if beacons.get(r) != address]:
            self._asking.pop(replica)[1].cancel()
            with self._lock:
                self._heard.pop(replica, None)
        for replica in beacons.keys() - self._asking.keys():
            task = asyncio.ensure_future(self._ask_on(replica, *beacons[replica]))
            self._asking[replica] = beacons[replica], task

    async def _ask_on(self, replica: Hashable, host: str, port: int) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._ask_while_connected(replica, host, port)
            await asyncio.sleep(ASK_EVERY_S)

    async def _ask_while_connected(self, replica: Hashable, host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            while True:
                writer.write(_ASK)
                await reader.readexactly(1)
                with self._lock:
                    self._heard[replica] = self._time
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            writer.close()
