"""Pieces of Lark grammars of llguidance, and the error for what cannot be written as one."""

from __future__ import annotations

import re

ANY = r"/(?s:.*)/"
"""Any text."""

SPACE = r"[ \n\r\t]*"
"""White space, inside a regular expression."""


class NotExpressibleError(Exception):
    """llguidance cannot have this grammar. The message is a sentence for the client."""


def unknown(what: str) -> NotExpressibleError:
    return NotExpressibleError(f"Only xgrammar has {what}, and it does not support the rest.")


def escaped(text: str) -> str:
    """A text inside a regular expression between slashes."""
    return re.sub(r"([\\.^$*+?()\[\]{}|/&~#-])", r"\\\1", text).replace("\n", r"\n")
