"""The replica's side of the signs of life: a thread that answers one byte with one byte.

A thread answers, because an event loop that is busy with answers is late although the replica is
well. Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

logger = logging.getLogger("ray.serve")

R = TypeVar("R", bound=Hashable)

ASK_EVERY_S = 0.5
MAX_ASKERS = 256
"""Connections that one beacon keeps open; each ingress has one."""

HOST, PORT = "beacon_host", "beacon_port"
"""Keys of a beacon's address in what a replica's `record_routing_stats` returns."""

_ASK = b"?"


class Beacon:
    """A thread that answers for this process, and ends the process if its event loop hangs.

    host: the address to listen on.
    hang_s: seconds without a `tick` of the event loop after which it hangs.
    end: called with the exit status, to end the process.
    """

    def __init__(self, host: str, hang_s: float, end: Callable[[int], Any] = os._exit) -> None:
        self._host, self._hang_s, self._end = host, hang_s, end
        self._ticked = time.monotonic()
        self._port: int | None = None
        self._num_askers = 0
        threading.Thread(
            target=asyncio.run, args=(self._run(),), name="beacon", daemon=True
        ).start()

    @property
    def address(self) -> dict[str, Any]:
        """HOST and PORT, for the replica's report; empty until the thread listens."""
        return {} if self._port is None else {HOST: self._host, PORT: self._port}

    def tick(self) -> None:
        """Called by the event loop to show that it runs."""
        self._ticked = time.monotonic()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._answer, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        async with server:
            await self._watch()

    async def _watch(self) -> None:
        """Returns after the event loop has hung and the process was told to end."""
        slept = time.monotonic()
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            now = time.monotonic()
            # Time in which the whole process was stopped does not count as a hanging event loop.
            self._ticked += max(0.0, now - slept - 2 * ASK_EVERY_S)
            slept = now
            if now - self._ticked > self._hang_s:
                logger.error(
                    "The event loop has not run for %.0f s: this replica exits.", self._hang_s
                )
                self._end(1)
                return

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_askers += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while self._num_askers <= MAX_ASKERS and await reader.readexactly(1):
                    writer.write(_ASK)
                    await writer.drain()
        finally:  # also when the loop ends, and cancels this task
            self._num_askers -= 1
            writer.close()


def beacons(reports: Mapping[R, Mapping[str, Any]]) -> dict[R, tuple[str, int]]:
    """The addresses of the beacons, by replica, as the replicas reported them."""
    return {
        replica: (told[HOST], told[PORT])
        for replica, told in reports.items()
        if HOST in told and PORT in told
    }
