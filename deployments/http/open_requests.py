"""Bounds on the requests and body bytes that are here at the same time, in total and per client.

A client is a tenant if API keys are configured, and an address otherwise. The proxy counts by
address. Pure; used from one event loop.
"""

from __future__ import annotations

from collections import Counter

from cfg_core.errors import OverloadedError
from deployments.config.limits import LimitsArgs


class OpenRequests:
    """Counts the requests and body bytes that are here, in total and of each client."""

    def __init__(self, args: LimitsArgs) -> None:
        self.args = args
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._num_requests = self._num_bytes = 0

    def begin(self, client: str) -> OpenRequest:
        """Count a new request of `client`.

        The caller must call `end` of the OpenRequest. Raises OverloadedError if there are too many
        requests.
        """
        if self._num_requests >= self.args.max_requests:
            raise _too_many(
                f"This server has {self._num_requests} requests in progress, its maximum"
            )
        if self._requests[client] >= self.args.max_requests_per_client:
            raise _too_many(
                f"This client has {self._requests[client]} requests in progress, its maximum"
            )
        self.add(client, requests=1)
        return OpenRequest(self, client)

    @property
    def count(self) -> int:
        """The requests in progress, of all clients."""
        return self._num_requests

    def hold(self, client: str, num_bytes: int) -> None:
        """Count more bytes of a body.

        Raises OverloadedError if there are too many.
        """
        if self._num_bytes + num_bytes > self.args.max_body_bytes_at_once:
            raise _too_many(
                f"The bodies of the requests in progress have {self._num_bytes} bytes, and this one"
                f" would exceed the limit of {self.args.max_body_bytes_at_once}"
            )
        if self._bytes[client] + num_bytes > self.args.max_body_bytes_per_client:
            raise _too_many(
                f"The bodies of this client's requests have {self._bytes[client]} bytes, and this"
                f" one would exceed the limit of {self.args.max_body_bytes_per_client}"
            )
        self.add(client, num_bytes=num_bytes)

    def add(self, client: str, requests: int = 0, num_bytes: int = 0) -> None:
        """Add to the counts of `client`; negative numbers subtract."""
        self._num_requests += requests
        self._num_bytes += num_bytes
        for counts, more in ((self._requests, requests), (self._bytes, num_bytes)):
            counts[client] += more
            if not counts[client]:
                del counts[client]

    def check_integrity(self) -> None:
        """Assert the invariants that hold between events; for tests."""
        for counts, total in ((self._requests, self._num_requests), (self._bytes, self._num_bytes)):
            assert sum(counts.values()) == total
            assert all(count > 0 for count in counts.values())


class OpenRequest:
    """One request, from its head to the end of its answer."""

    def __init__(self, requests: OpenRequests, client: str) -> None:
        self._requests, self._client = requests, client
        self._num_bytes = 0
        self._ended = False

    def hold(self, num_bytes: int) -> None:
        """Count more bytes of its body.

        Raises OverloadedError if there are too many.
        """
        if num_bytes:
            self._requests.hold(self._client, num_bytes)
            self._num_bytes += num_bytes

    def end(self) -> None:
        """Take the request and its bytes out of the counts; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._requests.add(self._client, requests=-1, num_bytes=-self._num_bytes)


def _too_many(what: str) -> OverloadedError:
    return OverloadedError(f"{what}: wait until some requests have ended.", 1.0, "open_requests")
