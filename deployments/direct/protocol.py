"""What both sides of a direct call have in common: frames, proofs, and options of the sockets.

Frames are messages on a byte stream, each with its length in front.

By proofs, both sides show that they know the same secret: each sends a random challenge, and
answers the other's with a keyed hash (HMAC-SHA256, RFC 2104) of both challenges and its own role.
The role keeps a listener's proof from being used as a caller's.

A connection that is gone must be noticed. A firewall may drop it without telling either side, and
Linux would notice after two hours.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct

from typing_extensions import Buffer

MAX_FRAME_BYTES = 2**28
"""As large as the messages that Serve may send between replicas (configs/serve.env)."""

END = b""
"""The frame that ends an answer."""

REFUSED = b"R"
"""The frame in place of an answer: this replica takes no call now. A pickle never equals it."""

CHALLENGE_BYTES, PROOF_BYTES = 32, 32

CALLER, LISTENER = b"caller", b"listener"
"""The roles."""

IDLE_S, PROBE_S, PROBES = 10, 5, 3
"""Idle seconds before the first keepalive probe, between two, and how many may stay unanswered."""

UNACKNOWLEDGED_S = 25
"""Seconds in which the other side must acknowledge a call. Linux' own limit is about 15 minutes."""

_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """The other side does not speak this protocol."""


def frame(payload: bytes) -> bytes:
    """`payload` as it is sent. Raises FrameError if it is longer than MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"A message of {len(payload)} bytes is too long.")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames.

    max_bytes: the longest payload that is accepted; it may be changed between two calls of `feed`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> list[bytes]:
        """The payloads that are complete with `data`. Raises FrameError if one is too long."""
        self._buffer += data
        payloads, start = [], 0
        while len(self._buffer) >= start + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self.max_bytes:
                raise FrameError(f"A message of {size} bytes is too long.")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads


def new_challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def proof(secret: bytes, role: bytes, listener_challenge: bytes, caller_challenge: bytes) -> bytes:
    """The proof of `role` for the challenges of both sides."""
    return hmac.digest(secret, role + listener_challenge + caller_challenge, "sha256")


def is_proof(
    given: bytes, secret: bytes, role: bytes, listener_challenge: bytes, caller_challenge: bytes
) -> bool:
    """Whether `given` is that proof; takes the same time whatever is wrong with it."""
    wanted = proof(secret, role, listener_challenge, caller_challenge)
    return hmac.compare_digest(given, wanted)


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
