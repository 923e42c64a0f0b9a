"""Bounds on the head of an HTTP message: its lines, its bytes, and the time in which it arrives.

Pure. The trailers of a chunked body count as lines of its head, because the server keeps them in
the same list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from cfg_core.errors import ConfigError

USUAL_LINES = 256
"""As `vllm serve` has it (`--h11-max-header-count`)."""
USUAL_BYTES = 2**16
USUAL_TIMEOUT_S = 10.0

_LINE_BYTES = 4  # the colon, the space and the end of a line


@dataclass(frozen=True, kw_only=True)
class HeadBounds:
    """What the head of one message may have.

    max_lines: header lines, and lines of trailers.
    max_bytes: of the request line and of all header lines. One read of the connection (256 KiB)
        more may be in memory.
    timeout_s: seconds in which it must arrive.
    """

    max_lines: int = USUAL_LINES
    max_bytes: int = USUAL_BYTES
    timeout_s: float = USUAL_TIMEOUT_S

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> HeadBounds:
        """The bounds that the environment sets. Raises ConfigError if one is no number above 0."""
        return cls(
            max_lines=int(_number(environment, "CFG_SERVE_MAX_HEAD_LINES", USUAL_LINES)),
            max_bytes=int(_number(environment, "CFG_SERVE_MAX_HEAD_BYTES", USUAL_BYTES)),
            timeout_s=_number(environment, "CFG_SERVE_HEAD_TIMEOUT_S", USUAL_TIMEOUT_S),
        )


class HeadCount:
    """What has come of the head and of the trailers of one message.

    refusal: for the client, once a bound was exceeded.
    """

    def __init__(self, bounds: HeadBounds) -> None:
        self._bounds = bounds
        self._lines = self._line_bytes = self._read_bytes = self._body_bytes = 0
        self.refusal = ""

    def line(self, num_bytes: int) -> None:
        """Count a complete header line.

        num_bytes: of its name and its value. Raises HeadTooLargeError.
        """
        self._lines += 1
        self._line_bytes += num_bytes + _LINE_BYTES
        if self._lines > self._bounds.max_lines:
            self.refuse(
                f"The request has more than {self._bounds.max_lines} header lines: send fewer."
            )
        self._check(self._line_bytes)

    def request_line(self, num_bytes: int) -> None:
        """Count a part of the request line. Raises HeadTooLargeError."""
        self._line_bytes += num_bytes
        self._check(self._line_bytes)

    def body(self, num_bytes: int) -> None:
        self._body_bytes += num_bytes

    def read(self, num_bytes: int) -> None:
        """Count a read from the connection that brought a part of the head, and no body.

        This bounds a line that does not end. Within a chunked body, the lengths of chunks come in
        such reads, too. So a body adds its size to what is allowed. Raises HeadTooLargeError.
        """
        self._read_bytes += num_bytes
        self._check(self._read_bytes - self._body_bytes)

    def refuse(self, message: str) -> NoReturn:
        """Raise HeadTooLargeError, and keep the message."""
        self.refusal = message
        raise HeadTooLargeError(message)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._bounds.max_bytes:
            self.refuse(
                "The request line and the headers have more than"
                f" {self._bounds.max_bytes} bytes: send the data in the body."
            )


class HeadTooLargeError(Exception):
    """The head of a message exceeds its bounds; the text is for the client."""


def _number(environment: Mapping[str, str], name: str, usual: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else usual
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {text!r}: set it to a number above 0, or leave it out.")
    return value
