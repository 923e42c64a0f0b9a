"""Of a text far longer than the model takes, the part that decides which tokens are kept.

A text is cut at white space, where no token reaches over; so the tokens before the cut are those of
the whole text. To be sure of it near the cut, the part has more tokens than are needed.
"""

from __future__ import annotations

from typing import Any

CHARS_PER_TOKEN = 12
"""Of the first part that is tried. English has about 4; a text of long words or of much white space
needs more."""
SLACK_TOKENS = 64
_SEARCH = 2000  # characters in which white space is looked for
_GROWTH = 4


def is_long(text: str, num_tokens: int) -> bool:
    """Whether it pays to look for a part of `text`."""
    return len(text) > 2 * _first_length(num_tokens)


def excerpt(tokenizer: Any, text: str, num_tokens: int, side: str) -> str | None:
    """A part of `text` with more than `num_tokens` tokens: its beginning, or its end if `side`,
    from which tokens are cut, is `left`. None if there is none much shorter than the text, or if
    the tokenizer's tokens reach over spaces.
    """
    length = _first_length(num_tokens)
    while getattr(tokenizer, "splits_words", False) and 2 * length < len(text):
        part = _beginning(text, length) if side == "right" else _end(text, length)
        if part is not None and len(tokenizer.encode([part])[0].ids) >= num_tokens + SLACK_TOKENS:
            return part
        length *= _GROWTH
    return None


def _first_length(num_tokens: int) -> int:
    return CHARS_PER_TOKEN * (num_tokens + SLACK_TOKENS)


def _beginning(text: str, length: int) -> str | None:
    place = text.rfind(" ", max(0, length - _SEARCH), length)
    return text[:place] if place > 0 else None


def _end(text: str, length: int) -> str | None:
    start = len(text) - length
    place = text.find(" ", start, start + _SEARCH)
    return text[place:] if place >= 0 else None
