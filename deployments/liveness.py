"""Signs of life between processes, from threads of their own: slow is not dead.

A replica that hangs, a node that died and a cut link look alike from the ingress: nothing comes. A replica whose
event loop is busy with answers looks the same, and is well. So neither side asks its event loop. A `Beacon` in the
replica's process answers one byte with one byte, in a thread; a `Lookout` in the ingress asks each replica's beacon
twice a second, in a thread, and knows for how long a replica has been silent.

A replica is never called silent unless its beacon was heard before: where a firewall closes the beacon's port, only
Ray's own health checks find a hanging node. Time in which the asking process itself did not run does not count.

Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

logger = logging.getLogger("ray.serve")

ASK_EVERY_S = 0.5
MAX_ASKERS = 256
"""Connections that one beacon keeps open; each ingress has one."""

HOST, PORT = "beacon_host", "beacon_port"
"""Where a beacon listens, as keys of what a replica's `record_routing_stats` returns."""

_ASK = b"?"


class Beacon:
    """A thread that answers for this process, and ends it if the event loop has not run for `hang_s` seconds.

    host: the address to listen on. `tick` must be called by the event loop more often than `hang_s`.
    """

    def __init__(self, host: str, hang_s: float, end: Callable[[int], Any] = os._exit) -> None:
        self._host, self._hang_s, self._end = host, hang_s, end
        self._ticked = time.monotonic()
        self._port: int | None = None
        self._num_askers = 0
        threading.Thread(target=asyncio.run, args=(self._run(),), name="beacon", daemon=True).start()

    @property
    def address(self) -> dict[str, Any]:
        """HOST and PORT, for the replica's report; empty until the thread listens."""
        return {} if self._port is None else {HOST: self._host, PORT: self._port}

    def tick(self) -> None:
        """Called by the event loop: it runs."""
        self._ticked = time.monotonic()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._answer, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        slept = time.monotonic()
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            now = time.monotonic()
            self._ticked += max(0.0, now - slept - 2 * ASK_EVERY_S)  # this whole process stood still
            slept = now
            if now - self._ticked > self._hang_s:
                logger.error("The event loop has not run for %.0f s: this replica exits.", self._hang_s)
                self._end(1)
                return

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_askers += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            while self._num_askers <= MAX_ASKERS and await reader.readexactly(1):
                writer.write(_ASK)
                await writer.drain()
        self._num_askers -= 1
        writer.close()


def beacons(reports: Mapping[Hashable, Mapping[str, Any]]) -> dict[Hashable, tuple[str, int]]:
    """Where the beacons listen, by replica, as the replicas reported it."""
    return {replica: (told[HOST], told[PORT]) for replica, told in reports.items() if HOST in told and PORT in told}


class Lookout:
    """A thread that asks beacons, and tells how long each has been silent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._time = 0.0  # seconds in which this thread ran
        self._heard: dict[Hashable, float] = {}  # of that time
        self._asking: dict[Hashable, tuple[tuple[str, int], asyncio.Task[None]]] = {}

    def watch(self, beacons: Mapping[Hashable, tuple[str, int]]) -> None:
        """Ask these from now on, by replica: host and port. From any thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), name="lookout", daemon=True).start()
        self._loop.call_soon_threadsafe(self._follow, dict(beacons))

    def silent_s(self, replica: Hashable) -> float:
        """How long nothing was heard of this replica; 0 if it was never heard, or is not watched."""
        with self._lock:
            heard = self._heard.get(replica)
            return 0.0 if heard is None else self._time - heard

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._clock = loop.create_task(self._count_time())
        loop.run_forever()

    async def _count_time(self) -> None:
        """A tick that comes late counts as one tick: this process was stopped, or had no CPU."""
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


lookout = Lookout()
"""Of this process. Used by the ingress and by its request routers, through these methods only (see fleet.py)."""
