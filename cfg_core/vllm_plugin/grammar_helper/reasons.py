"""A compiler's message as a sentence for the client.

Nothing in it shows the compiler's source (paths, line numbers, failed checks), nor a long run of
characters that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

QUOTED_CHARS = 16
"""Shortest run of the client's characters that is removed from a message.

Shorter runs may be common words.
"""

_MOST_READ = 1000
_REASON_CHARS = 300
_INTERNAL = re.compile(
    r"\[\d\d:\d\d:\d\d\] "  # xgrammar's clock
    r"|\S*\.(?:cc|cpp|h|hpp|rs|py):\d+:? ?"  # a place in a source
    r"|Check failed: .*? is false:? ?"
    r"|\bat \d+\(\d+\): "  # a place in what we made of the client's text for llguidance
)
_DUMP = re.compile(r"\n *1 \|.*|\n<state>.*", re.DOTALL)
"""Where llguidance begins to print the grammar, or its own state."""

_NO_REASON = "Its compiler does not support it, and gives no reason. Simplify it."


def reason_of(error: Exception, fields: Mapping[str, Any]) -> str:
    """The compiler's message in one line, without its internals and without what the client sent.

    fields: the grammar as the client sent it.
    """
    said = _said(error)[:_MOST_READ]
    said = " ".join(_INTERNAL.sub("", _DUMP.sub("", said)).split())
    said = without(said, _source(fields))[:_REASON_CHARS].rstrip()
    return _NO_REASON if not said or said.endswith(":") else said


def _said(error: BaseException) -> str:
    """What an error says. vLLM hides some of xgrammar's reasons behind a sentence of its own."""
    said = str(error.args[0]) if error.args else ""
    cause = error.__cause__
    if isinstance(cause, RuntimeError) and str(cause) not in said:
        return f"{said} {_said(cause)}"
    return said


def _source(fields: Mapping[str, Any]) -> str:
    """The client's own text in `fields`, in one line."""
    return " ".join(
        " ".join(
            v if isinstance(v, str) else repr(v) for v in fields.values() if v is not None
        ).split()
    )


def without(said: str, source: str) -> str:
    """Return `said` with "..." for every long run of characters that also stands in `source`.

    A run is long if it has at least QUOTED_CHARS characters.
    """
    ends = [
        i + QUOTED_CHARS
        for i in range(len(said))
        if len(said[i : i + QUOTED_CHARS]) == QUOTED_CHARS
    ]
    quoted = {
        i
        for end in ends
        if said[end - QUOTED_CHARS : end] in source
        for i in range(end - QUOTED_CHARS, end)
    }
    kept = "".join("\0" if i in quoted else char for i, char in enumerate(said))
    return re.sub("\0+", "...", kept)
