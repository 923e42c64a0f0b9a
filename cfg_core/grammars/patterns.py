"""Regular expressions of schemas: what the compilers cannot read (standard library only)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_NO_CHARACTER = frozenset("bB<>AZGkK123456789")
"""What a backslash makes a place in the text, or a reference to an earlier group."""

_SINGLE = r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"
"""An escape or a character class: what stands in it opens and closes nothing."""


def looks_around(pattern: str) -> bool:
    """Whether a pattern has a lookahead or a lookbehind. xgrammar drops these."""
    return any(piece in _AROUND for piece in _pieces(pattern))


def unreadable(pattern: str) -> bool:
    """Whether a pattern has a word boundary, a reference to a group, or an atomic group."""
    return any(
        piece == "(?>" or (piece[0] == "\\" and piece[1:] in _NO_CHARACTER)
        for piece in _pieces(pattern)
    )


def _pieces(pattern: str) -> Iterable[str]:
    """Escapes and openings of groups outside of character classes."""
    return (
        piece
        for piece in re.findall(rf"{_SINGLE}|\(\?<?[=!]|\(\?>", pattern, re.DOTALL)
        if not piece.startswith("[")
    )


def without_lookaheads(pattern: str) -> list[str] | None:
    """Patterns that all must match where `pattern` must, if it begins with lookaheads.

    `^(?=.*[a-z])(?=.*[0-9]).{8,}$` becomes three. None if a lookahead stands elsewhere, or negates.
    """
    found, rest = list[str](), pattern
    if not rest.startswith("^(?="):
        return None
    rest = rest[1:]
    while rest.startswith("(?="):
        end = _closing(rest)
        if end is None:
            return None
        found.append(f"^(?:{rest[3:end]})")
        rest = rest[end + 1 :]
    found.append(f"^{rest}")
    whole = not any(looks_around(one) for one in found) and not _has_top_level_bar(rest)
    return found if whole else None


def _closing(pattern: str) -> int | None:
    """The place of the bracket that closes the group with which `pattern` begins."""
    return next((at for at, _, depth in _marks(pattern) if depth == 0), None)


def _has_top_level_bar(pattern: str) -> bool:
    return any(mark == "|" and depth == 0 for _, mark, depth in _marks(pattern))


def _marks(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The place of each bracket and bar of a pattern, and how many groups are open behind it."""
    depth = 0
    for found in re.finditer(rf"{_SINGLE}|[()|]", pattern, re.DOTALL):
        if (mark := found.group()) in "()|":
            depth += {"(": 1, ")": -1}.get(mark, 0)
            yield found.start(), mark, depth


def other_than(texts: Iterable[str]) -> str:
    """A pattern for every text but `texts`."""
    return f"^{_other(frozenset(texts))}$"


def _other(texts: frozenset[str]) -> str:
    """An expression for what does not equal any of `texts`, at least one."""
    firsts = sorted({text[0] for text in texts if text})
    ways = [
        _char(first) + _other(frozenset(text[1:] for text in texts if text[:1] == first))
        for first in firsts
    ]
    ways.append(f"[^{''.join(map(_char, firsts))}]{ANY}" if firsts else rf"[\s\S]{ANY}")
    return f"(?:{'|'.join(ways)}){'' if '' in texts else '?'}"


ANY = r"[\s\S]*"


def _char(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
