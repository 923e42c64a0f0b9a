"""Frames between the frontend and the grammar helper, over the helper's stdin and stdout.

A frame is a header and a payload. The frontend sends TRY and CANCEL. The helper answers with READY,
VERDICT, KILLED or FAILED. This module needs the standard library only.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

HEADER = struct.Struct("!IcQ")
"""Length of the payload in bytes, kind of the frame, number of the trial."""

TRY, CANCEL = b"T", b"C"
READY, VERDICT, KILLED, FAILED = b"Y", b"V", b"K", b"F"

OUT_OF_CPU, OUT_OF_TIME, DIED, GONE = b"cpu", b"time", b"died", b"gone"
"""The payloads of KILLED: by its limit of CPU time, by its deadline, by itself (out of memory or
stack), and by somebody else, for example by a system that is out of memory."""


def frame(kind: bytes, trial: int = 0, payload: bytes = b"") -> bytes:
    """The bytes of one frame."""
    return HEADER.pack(len(payload), kind, trial) + payload


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes of an unbuffered stream. Raises EOFError if it ends earlier."""
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
