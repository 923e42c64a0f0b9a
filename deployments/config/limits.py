"""The `limits:` of `args:`: what clients may hold of an ingress at once."""

from __future__ import annotations

from pydantic import Field

from deployments.config.base import YamlArgs


class LimitsArgs(YamlArgs):
    """The `limits:` of `args:`: what clients may hold of each replica of CfgRouter."""

    section = "limits"

    max_requests: int = Field(
        default=2000, ge=1, description="Requests at once; beyond, clients get 429."
    )
    max_requests_per_client: int = Field(
        default=512,
        ge=1,
        description=(
            "Requests at once of one API key, or of one address where there are no keys. Behind a"
            " load balancer on another machine, set FORWARDED_ALLOW_IPS, or all clients have its"
            " address."
        ),
    )
    max_body_bytes_at_once: int = Field(
        default=256 * 2**20,
        ge=1,
        description="Bytes of request bodies that are held at once; beyond, 429.",
    )
    max_body_bytes_per_client: int = Field(
        default=64 * 2**20, ge=1, description="The same, of one client."
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="How long a body may take to arrive; then 408, and the connection is closed.",
    )
    stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="After how long a client is given up that does not read its answer.",
    )
    max_answer_bytes: int = Field(
        default=64 * 2**20,
        ge=2**20,
        description=(
            "The largest answer that is not a stream, estimated before it is computed; beyond, 400."
        ),
    )
