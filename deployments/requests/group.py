"""GroupRequest: what the placement policy needs to know about a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.requests.endpoints import BODY_FIELDS, Endpoint
from deployments.requests.prefix_hashes import Prefix
from deployments.requests.streams import Groups

MAX_COPIES = 256
"""Maximum number of groups that are counted for one request.

Without it, a request for more groups than any engine can hold would make every replica look full.
"""

OUTPUT_TOKENS = 128
"""Output tokens for which a replica should have free KV blocks when a stream starts there.

It is less if the request allows fewer output tokens. If a stream later needs more blocks than are
free, the engine preempts.
"""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """The streams of one request, as the placement policy sees them.

    prefixes: one for each stream of a group.
    copies: the number of such groups. `n` and lists of prompts make several.
    output_tokens: of each stream, at most OUTPUT_TOKENS.
    session: the name that the client gave its conversation, if any.
    """

    prefixes: tuple[Prefix, ...]
    copies: int = 1
    output_tokens: int = OUTPUT_TOKENS
    session: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the prompts of one group, all streams together."""
        return sum(prefix.num_tokens for prefix in self.prefixes)

    @property
    def streams(self) -> int:
        return self.copies * len(self.prefixes)

    def blocks(self, block_size: int) -> int:
        """KV blocks of all streams, if no block is shared.

        block_size: tokens in a block.
        """
        lengths = (prefix.num_tokens + self.output_tokens for prefix in self.prefixes)
        return self.copies * sum(math.ceil(length / block_size) for length in lengths)


def group_request(
    endpoint: Endpoint,
    body: Mapping[str, Any],
    groups: Groups,
    *,
    tenant: str | None = None,
    session: str | None = None,
) -> GroupRequest:
    """The GroupRequest of a request; the first prompt of a list stands for all.

    It hashes the prompts, which takes milliseconds if they are long.

    groups: its streams.
    tenant: the tenant whose KV cache no other tenant may reuse; None if prefixes are shared.
    Never raises.
    """
    # Neither two adapters nor two cache salts share KV.
    salt, model = f"{body.get('cache_salt')} {tenant}", body.get("model")
    longest = next(filter(None, map(body.get, BODY_FIELDS[endpoint].max_tokens)), None)
    return GroupRequest(
        prefixes=tuple(
            Prefix.of(s.prompt, f"{model if s.adapter is None else s.adapter} {salt}")
            for s in groups[0]
        ),
        copies=min(MAX_COPIES, _count(body.get("n"), 1) * len(groups)),
        output_tokens=min(OUTPUT_TOKENS, _count(longest, OUTPUT_TOKENS)),
        session=session or None,
    )


def _count(value: object, default: int) -> int:
    """`value` if it is a positive integer, else `default`."""
    return value if type(value) is int and value > 0 else default
