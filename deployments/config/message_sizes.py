"""Check that the largest bodies and answers fit into the messages between Serve's replicas.

With gRPC between replicas the size of a message is limited. Serve reads the limit from the
environment of each process. A call with a larger message fails, in the case of an answer only after
all the work is done. So the application does not start if its own limits allow such a message.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from cfg_core.errors import ConfigError

USES_GRPC, MAX_LENGTH = "RAY_SERVE_USE_GRPC_BY_DEFAULT", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
DEFAULT_MAX_LENGTH = 4 * 2**20
"""Serve's own limit, in bytes, if the variable MAX_LENGTH is not set."""

BODY_GROWTH = 3
"""A decoded and pickled body has at most this many times the bytes of its JSON text.

For example, `1e1,` has 4 bytes, and a pickled float has 9.
"""

ENVELOPE_BYTES = 2**16
"""Bytes of a message that are left for guidance, headers, and what Serve adds."""


def check_message_sizes(
    max_body_bytes: int, max_answer_bytes: int, environment: Mapping[str, str]
) -> None:
    """Raise ConfigError if a message cannot hold the largest body, or an encoder's largest answer.

    environment: the environment variables of this process.
    """
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
