"""How large a message between two replicas of Serve may be, and what follows from it for bodies and
answers.

With gRPC between replicas a message has a limit, which Serve reads from the environment of each
process. A call with a larger one fails after all the work. So an application whose limits do not go
together does not start. Standard library.
"""

from __future__ import annotations

from collections.abc import Mapping

from cfg_core.errors import ConfigError

USES_GRPC, MAX_LENGTH = "RAY_SERVE_USE_GRPC_BY_DEFAULT", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
DEFAULT_MAX_LENGTH = 4 * 2**20
"""Serve's, where MAX_LENGTH is not set."""

BODY_GROWTH = 3
"""A decoded body, pickled, has at most so many times the bytes of its JSON: `1e1,` has 4, a pickled
float 9."""

ENVELOPE_BYTES = 2**16
"""Guidance, headers, and what Serve adds."""


def check_message_sizes(
    max_body_bytes: int, max_answer_bytes: int, environment: Mapping[str, str]
) -> None:
    """Raise ConfigError if the largest body or the largest answer of an encoder does not fit a
    message."""
    if environment.get(USES_GRPC) != "1":
        return
    limit = int(environment.get(MAX_LENGTH, DEFAULT_MAX_LENGTH)) - ENVELOPE_BYTES
    needs = {
        "access.max_body_bytes": BODY_GROWTH * max_body_bytes,
        "max_answer_bytes": max_answer_bytes,
    }
    for name, needed in needs.items():
        if needed > limit:
            raise ConfigError(
                f"`{name}` needs messages of {needed} bytes between replicas, and {MAX_LENGTH}"
                f" allows {limit}: set it to {needed + ENVELOPE_BYTES} or more before `ray start`"
                f" (configs/serve.env), or lower `{name}`."
            )
