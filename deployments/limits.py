"""How many requests and body bytes an ingress holds at once, in all and of each client. Pure; used from one event loop.

A client is a tenant where API keys are configured, else an address.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from pydantic import Field

from cfg_core.errors import OverloadedError
from deployments.yaml_args import YamlArgs


class LimitsArgs(YamlArgs):
    """The `limits:` of `args:`: what clients may hold of each replica of CfgRouter."""

    section = "limits"

    max_requests: int = Field(default=2000, ge=1, description="Requests at once; beyond, clients get 429.")
    max_requests_per_client: int = Field(
        default=512,
        ge=1,
        description="Requests at once of one API key, or of one address where there are no keys. Behind a load "
        "balancer on another machine, set FORWARDED_ALLOW_IPS, or all clients have its address.",
    )
    max_body_bytes_at_once: int = Field(
        default=256 * 2**20, ge=1, description="Bytes of request bodies that are held at once; beyond, 429."
    )
    max_body_bytes_per_client: int = Field(default=64 * 2**20, ge=1, description="The same, of one client.")
    body_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a body may take to arrive; then 408, and the connection is closed."
    )
    stall_timeout_s: float = Field(
        default=60.0, gt=0, description="After how long a client is given up that does not read its answer."
    )
    max_answer_bytes: int = Field(
        default=64 * 2**20,
        ge=2**20,
        description="The largest answer that is not a stream, estimated before it is computed; beyond, 400.",
    )


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
