"""Options of the sockets of direct calls: a connection that is gone must be noticed.

A firewall may drop a connection without telling either side. Linux would notice after two hours.
"""

from __future__ import annotations

import asyncio
import socket

IDLE_S, PROBE_S, PROBES = 10, 5, 3
"""Idle seconds before the first keepalive probe, between two, and how many may stay unanswered."""

UNACKNOWLEDGED_S = 25
"""Seconds in which the other side must acknowledge a call. Linux' own limit is about 15 minutes."""


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Close the connection if the other side does not answer probes for 25 s."""
    connected: socket.socket = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", PROBE_S),
        ("TCP_KEEPCNT", PROBES),
    ):
        if hasattr(socket, option):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def limit_unacknowledged(transport: asyncio.BaseTransport) -> None:
    """Close the connection if what was sent is not acknowledged for UNACKNOWLEDGED_S.

    This is for callers only. Linux also counts the time in which the other side has no room, and an
    answer may have to wait for a client that reads slowly.
    """
    connected: socket.socket = transport.get_extra_info("socket")
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_S)
