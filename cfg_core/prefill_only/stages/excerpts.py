"""Finds the part that is enough to tokenize of a text far longer than the model takes.

The part is cut off at white space, which no token spans, so its tokens are those of the whole text.
The tokens near the cut might still differ, so the part has more tokens than are needed.
"""

from __future__ import annotations

from typing import Any

CHARS_PER_TOKEN = 12
"""Assumed characters per token, for the first part that is tried.

English has about 4. A text with long words or with much white space has more.
"""
SLACK_TOKENS = 64
"""Tokens that a part must have beyond those that are needed."""
_SEARCH = 2000  # characters next to the cut in which a space is searched for
_GROWTH = 4  # factor by which a part grows that has too few tokens


def is_long(text: str, num_tokens: int) -> bool:
    """Whether `text` is so long that it pays to tokenize only a part of it."""
    return len(text) > 2 * _first_length(num_tokens)


def excerpt(tokenizer: Any, text: str, num_tokens: int, side: str) -> str | None:
    """A part of `text` with more than `num_tokens` tokens, or None.

    side: the side from which tokens will be cut. The part is the beginning of the text for `right`,
    and its end for `left`.

    Returns None if no such part is much shorter than the text, or if tokens may span spaces.
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
