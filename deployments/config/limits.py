"""The section `limits:` of `args:`: what clients may use of an ingress at the same time."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from pydantic import Field

from deployments.config.base import YamlArgs
from deployments.requests.shape import ShapeBounds

_S = ShapeBounds()


class LimitsArgs(YamlArgs):
    """The section `limits:` of `args:`.

    Each replica of CfgRouter counts for itself.
    """

    section = "limits"

    max_requests: int = Field(
        default=2000,
        ge=1,
        description=(
            "Maximum number of requests at the same time. A further request gets 429. Each replica"
            " of CfgRouter counts for itself; this holds for all keys of this section."
        ),
    )
    max_requests_per_client: int = Field(
        default=512,
        ge=1,
        description=(
            "Maximum number of requests of one client at the same time. A further request gets 429."
            " A client is an API key, or an address if there are no keys. Name a proxy in"
            " `http.trusted_proxies`; otherwise all its clients have the proxy's address."
        ),
    )
    max_body_bytes_at_once: int = Field(
        default=256 * 2**20,
        ge=1,
        description=(
            "Maximum size, in bytes, of the bodies of all requests that are in progress, together."
            " A request whose body would exceed it gets 429."
        ),
    )
    max_body_bytes_per_client: int = Field(
        default=64 * 2**20,
        ge=1,
        description="The same for the requests of one client.",
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description=(
            "Seconds that a request body may take to arrive. After that the client gets 408, and"
            " the connection is closed."
        ),
    )
    stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description=(
            "Seconds after which a request is aborted because its client does not read the answer."
        ),
    )
    max_answer_bytes: int = Field(
        default=64 * 2**20,
        ge=2**20,
        description=(
            "Maximum size, in bytes, of an answer of generated text that is not streamed. It is"
            " estimated before the answer is computed. A request for more gets 400."
        ),
    )
    max_values: int = Field(
        default=_S.max_values,
        ge=1024,
        description=(
            "Maximum number of objects, lists and texts in a request body. The names of an object's"
            " entries are texts, too, so a message with a role and a content counts as five."
            " 32 numbers in lists, such as token ids, count as one. A request with more gets 400"
            " before it is parsed."
        ),
    )
    max_copied_entries: int = Field(
        default=_S.max_copied_entries,
        ge=1024,
        description=(
            "Maximum number of entries of one field, such as `allowed_token_ids`, times the choices"
            " (`n` times the prompts) that each get a copy of it. An entry of `stop_token_ids` or"
            " `logit_bias` counts as 4, and one of `bad_words` as 200. A request with more gets"
            " 400."
        ),
    )
    max_copied_bytes: int = Field(
        default=_S.max_copied_bytes,
        ge=2**16,
        description=(
            "Maximum size, in bytes of JSON text, of one such field, times the choices that each"
            " get a copy of it. A byte of `bad_words` counts as 400. A request with more gets 400."
        ),
    )

    @cached_property
    def shape(self) -> ShapeBounds:
        """The bounds on the shape of bodies."""
        names = [field.name for field in dataclasses.fields(ShapeBounds)]
        return ShapeBounds(**{name: getattr(self, name) for name in names})
