"""Pieces of Lark grammars of llguidance, and the error for what cannot be written as one."""

from __future__ import annotations

import json
import re
from typing import Any

ANY = r"/(?s:.*)/"
"""Any text."""

SPACE = r"[ \n\r\t]*"
"""White space, inside a regular expression."""

_OPTIONS = "x-guidance"
"""The keyword in which a schema has options for llguidance."""


class JsonWhitespace:
    """How llguidance writes white space in JSON.

    It bounds white space around commas and colons. It cannot bound it after an opening bracket and
    before a closing one, so there it writes none.
    """

    def __init__(self, most: int | None = None) -> None:
        """most: characters of white space in a row, None for any number, everywhere."""
        self.most = most
        self.space = SPACE if most is None else rf"[ \n\r\t]{{0,{most}}}"

    def of(self, schema: Any, most: int | None = None) -> Any:
        """The schema with this way to write white space, or with another bound."""
        if most is not None:
            return JsonWhitespace(most).of(schema)
        if self.most is None or schema is False:
            return schema
        schema = {} if schema is True else schema
        ours = {
            "whitespace_flexible": False,
            "item_separator": f"{self.space},{self.space}",
            "key_separator": f"{self.space}:{self.space}",
        }
        return {**schema, _OPTIONS: {**ours, **(schema.get(_OPTIONS) or {})}}


class NotExpressibleError(Exception):
    """llguidance cannot have this grammar. The message is a sentence for the client."""


def unknown(what: str) -> NotExpressibleError:
    return NotExpressibleError(f"Only xgrammar has {what}, and it does not support the rest.")


def parsed(value: Any) -> Any:
    """A field that holds JSON, which a client may have sent as text."""
    return json.loads(value) if isinstance(value, str) else value


def escaped(text: str) -> str:
    """A text inside a regular expression between slashes."""
    return re.sub(r"([\\.^$*+?()\[\]{}|/&~#-])", r"\\\1", text).replace("\n", r"\n")
