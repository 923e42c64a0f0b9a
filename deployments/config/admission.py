"""The `admission:` of `args:`: who waits in front of the generator, and for how long."""

from __future__ import annotations

from pydantic import Field

from deployments.config.base import YamlArgs


class AdmissionArgs(YamlArgs):
    """The `admission:` of `args:`: who waits in front of the generator's replicas, and for how
    long.

    Each replica of CfgRouter has a queue of its own.
    """

    section = "admission"

    streams_per_replica: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Streams that may be with one replica at once, a guided request has two; the rest"
            " waits. Default: 1.25 times the engine's max_num_seqs, so that it has the next at"
            " hand."
        ),
    )
    max_queued_streams: int = Field(
        default=512, ge=0, description="Streams that may wait; beyond, clients get 429."
    )
    max_queued_tokens: int = Field(
        default=2_000_000,
        ge=0,
        description=(
            "Tokens that may wait, prompts and outputs of all streams, estimated; beyond, clients"
            " get 429."
        ),
    )
    max_streams_per_request: int = Field(
        default=256,
        ge=2,
        description="Streams of one request, choices times prompts, twice if guided; beyond, 400.",
    )
    streams_at_once_per_request: int | None = Field(
        default=None,
        ge=2,
        description=(
            "Streams that one request has in an engine at once; its other choices follow as these"
            " end. Default: half of the engine's max_num_seqs."
        ),
    )
    max_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description=(
            "Share of the engines' max_num_seqs that one tenant may have while another one is here;"
            " a tenant is an API key, or an address where there are no keys."
        ),
    )
    default_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description=(
            "The `timeout` of requests that bring none, to encoders too. Default: no limit."
        ),
    )
