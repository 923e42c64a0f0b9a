"""The section `admission:` of `args:`: the queue in front of the generator."""

from __future__ import annotations

from pydantic import Field

from deployments.config.base import YamlArgs

SPARE = 1.25
"""Streams sent to a replica for each one that it can run, so that the engine has the next ready."""


class AdmissionArgs(YamlArgs):
    """The section `admission:` of `args:`: the queue in front of the generator's replicas.

    Each replica of CfgRouter has a queue of its own.
    """

    section = "admission"

    streams_per_replica: int | None = Field(default=None, ge=1)
    """Maximum number of streams that are sent to the generator at the same time, for each of its
    replicas. Further streams wait in the queue. A guided request has two or more. Default: 1.25
    times the engine's `max_num_seqs`, so that the engine always has the next streams at hand.
    """

    max_queued_streams: int = Field(default=512, ge=0)
    """Maximum number of streams that wait in the queue. If there are more, the newest requests of
    the tenant that fills the queue most get 429.
    """

    max_queued_tokens: int = Field(default=2_000_000, ge=0)
    """Maximum number of tokens that wait in the queue: prompts and expected outputs of all streams,
    estimated. If there are more, the newest requests of the tenant that fills the queue most get
    429.
    """

    max_streams_per_request: int = Field(default=256, ge=2)
    """Maximum number of streams of one request: its choices (`n`) times its prompts, times the
    streams of a choice if it is guided (two or more). A request with more gets 400.
    """

    streams_at_once_per_request: int | None = Field(default=None, ge=2)
    """Maximum number of streams that one request has in an engine at the same time. Its other
    choices start as these end. Default: half of the engine's `max_num_seqs`.
    """

    max_share: float = Field(default=0.5, gt=0, le=1)
    """Maximum share of the engines' `max_num_seqs` (summed over all engines) that the streams of
    one tenant may take while another tenant sends requests, or has sent one within the last minute.
    A tenant is an API key, or a client address if there are no keys.
    """

    default_timeout_s: float | None = Field(default=None, gt=0)
    """Timeout, in seconds, of requests that set none themselves (field `timeout` or header
    `X-Request-Timeout`). It also applies to requests to encoders. Default: no limit.
    """

    def streams_at_once(self, max_num_seqs: int) -> int:
        """Streams that one request may have in an engine at once: at least the two of a pair."""
        return self.streams_at_once_per_request or max(2, max_num_seqs // 2)
