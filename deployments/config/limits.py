"""The section `limits:` of `args:`: what clients may use of an ingress at the same time."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from deployments.requests.shape import ShapeBounds


@dataclass(frozen=True, kw_only=True)
class LimitsArgs(ShapeBounds):
    """The section `limits:` of `args:`, which begins with the bounds on the shape of bodies.

    Each replica of CfgRouter counts for itself.
    """

    max_requests: int = Field(default=2000, ge=1)
    """Maximum number of requests at the same time. A further request gets 429."""

    max_requests_per_client: int = Field(default=512, ge=1)
    """Maximum number of requests of one client at the same time. A further request gets 429. A
    client is an API key, or an address if there are no keys. Name a proxy in
    `http.trusted_proxies`; otherwise all its clients have the proxy's address.
    """

    max_body_bytes_at_once: int = Field(default=256 * 2**20, ge=1)
    """Maximum size, in bytes, of the bodies of all requests that are in progress, together. A
    request whose body would exceed it gets 429.
    """

    max_body_bytes_per_client: int = Field(default=64 * 2**20, ge=1)
    """The same for the requests of one client."""

    body_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a request body may take to arrive. After that the client gets 408, and the
    connection is closed.
    """

    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a request is aborted because its client does not read the answer."""

    max_answer_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Maximum size, in bytes, of an answer of generated text that is not streamed. It is estimated
    before the answer is computed. A request for more gets 400.
    """
