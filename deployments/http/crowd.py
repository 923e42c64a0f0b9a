"""How many requests and body bytes an ingress holds at once, in all and of each client.

A client is a tenant where API keys are configured, else an address. Pure; used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from cfg_core.errors import OverloadedError
from deployments.config.limits import LimitsArgs


class Crowd:
    """Who is here, and with how much. Used by `Stay`."""

    def __init__(self, args: LimitsArgs) -> None:
        self.args = args
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._num_requests = self._num_bytes = 0

    def stay(self, client: str) -> Stay:
        """A request has come; the caller ends its stay. Raises OverloadedError."""
        if self._num_requests >= self.args.max_requests:
            raise _too_many(f"{self._num_requests} requests are here at once")
        if self._requests[client] >= self.args.max_requests_per_client:
            raise _too_many(f"This client has {self._requests[client]} requests here at once")
        self.add(client, requests=1)
        return Stay(self, client)

    def hold(self, client: str, num_bytes: int) -> None:
        """So many bytes more of a body. Raises OverloadedError."""
        if self._num_bytes + num_bytes > self.args.max_body_bytes_at_once:
            raise _too_many(f"Bodies of {self._num_bytes} bytes are here at once")
        if self._bytes[client] + num_bytes > self.args.max_body_bytes_per_client:
            raise _too_many(f"This client has bodies of {self._bytes[client]} bytes here at once")
        self.add(client, num_bytes=num_bytes)

    def add(self, client: str, requests: int = 0, num_bytes: int = 0) -> None:
        """Count more, or less."""
        self._num_requests += requests
        self._num_bytes += num_bytes
        for counts, more in ((self._requests, requests), (self._bytes, num_bytes)):
            counts[client] += more
            if not counts[client]:
                del counts[client]

    def check_integrity(self) -> None:
        """Assert what must hold between events. For tests."""
        for counts, total in ((self._requests, self._num_requests), (self._bytes, self._num_bytes)):
            assert sum(counts.values()) == total
            assert all(count > 0 for count in counts.values())


class Stay:
    """One request, from its head to the end of its answer."""

    def __init__(self, crowd: Crowd, client: str) -> None:
        self._crowd, self._client = crowd, client
        self._num_bytes = 0
        self._ended = False

    def hold(self, num_bytes: int) -> None:
        """So many bytes more of its body. Raises OverloadedError."""
        if num_bytes:
            self._crowd.hold(self._client, num_bytes)
            self._num_bytes += num_bytes

    def end(self) -> None:
        """It has gone. Again, it does nothing."""
        if not self._ended:
            self._ended = True
            self._crowd.add(self._client, requests=-1, num_bytes=-self._num_bytes)


class Turns:
    """Of each client so many requests at once; its others wait, first come, first served. Used from
    one event loop."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, client: str) -> asyncio.Semaphore:
        """To be held while a request of this client runs."""
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Semaphore(self._at_once)
        return turn


def _too_many(what: str) -> OverloadedError:
    return OverloadedError(f"{what}: wait until some have ended.", 1.0)
