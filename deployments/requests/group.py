"""GroupRequest: what the placement policy needs to know of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.requests.guidance import Endpoint, Guidance
from deployments.requests.prefixes import Prefix
from deployments.requests.streams import streams_of

MAX_COPIES = 256
"""Groups of one request that are counted. A request for more than any engine takes must not make
every replica look full."""

OUTPUT_TOKENS = 128
"""Tokens for which a stream must find room at the start, if it may get that long. Engines preempt
when more are needed."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """The streams of one request, as the policy sees them.

    prefixes: one for each stream of a group. copies: how many such groups, for `n` and for lists of
    prompts. output_tokens: of each stream, at most OUTPUT_TOKENS. session: what the client calls
    its conversation, if it says.
    """

    prefixes: tuple[Prefix, ...]
    copies: int = 1
    output_tokens: int = OUTPUT_TOKENS
    session: str | None = None

    @property
    def tokens(self) -> int:
        """Of the prompts of all streams of one group."""
        return sum(prefix.num_tokens for prefix in self.prefixes)

    @property
    def streams(self) -> int:
        return self.copies * len(self.prefixes)

    def blocks(self, block_size: int) -> int:
        """KV blocks of all streams, as if nothing were shared."""
        lengths = (prefix.num_tokens + self.output_tokens for prefix in self.prefixes)
        return self.copies * sum(math.ceil(length / block_size) for length in lengths)


def group_request(
    endpoint: Endpoint,
    body: Mapping[str, Any],
    guidance: Guidance | None,
    *,
    tenant: str | None = None,
    session: str | None = None,
) -> GroupRequest:
    """What a request asks of a replica. Of a list of prompts, the first stands for all.

    tenant: whose KV is found by nobody else; None: it is shared. Never raises.
    """
    groups = streams_of(endpoint, body, guidance)
    # Adapters have KV of their own, and so do salts.
    salt = f"{body.get('model')} {body.get('cache_salt')} {tenant}"
    longest = body.get("max_completion_tokens") or body.get("max_tokens")
    return GroupRequest(
        prefixes=tuple(Prefix.of(stream.prompt, salt) for stream in groups[0]),
        copies=min(MAX_COPIES, _count(body.get("n"), 1) * len(groups)),
        output_tokens=min(OUTPUT_TOKENS, _count(longest, OUTPUT_TOKENS)),
        session=session or None,
    )


def _count(value: object, default: int) -> int:
    """`value` if it is a positive integer, else `default`."""
    return value if type(value) is int and value > 0 else default
