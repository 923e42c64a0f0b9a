"""Frames: messages on a byte stream, each with its length in front."""

from __future__ import annotations

import struct

from typing_extensions import Buffer

MAX_FRAME_BYTES = 2**28
"""As large as the messages that Serve may send between replicas (configs/serve.env)."""

END = b""
"""The frame that ends an answer."""

REFUSED = b"R"
"""The frame in place of an answer: this replica takes no call now. A pickle never equals it."""

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
