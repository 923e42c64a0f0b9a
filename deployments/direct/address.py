"""Where a replica takes direct calls, as it publishes this in its report to Serve."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOST, PORT, SECRET = "direct_host", "direct_port", "direct_secret"
"""Keys in what a replica's `record_routing_stats` returns."""

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Address:
    """Host, port and secret of a replica's listener. The secret is not shown by `repr`."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def report(self) -> dict[str, Any]:
        return {HOST: self.host, PORT: self.port, SECRET: self.secret.hex()}


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def address_in(report: Mapping[str, Any]) -> Address | None:
    """The address in a replica's report; None if the replica takes no direct calls."""
    if HOST not in report:
        return None
    return Address(report[HOST], report[PORT], bytes.fromhex(report[SECRET]))
