"""`begun_token_ids`: the output that a request has already, because it began elsewhere.

The tokens count as the request's output in every respect, and it goes on behind them. It is for
Python and for our own processes: a caller who moves a request from one engine to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from cfg_core.errors import RequestError

FIELD = "begun_token_ids"
"""The extra argument of a caller: a list of token ids, or one such list for each choice of `n`."""

BEGUN = "cfg_serve_begun"
"""The extra argument that admission makes of it: a list for each choice. A caller cannot send it,
because the name looks like guidance, and is no field."""

TOLD = "cfg_serve_begun_told"
"""The extra argument that says that the frontend has read these tokens, as if the engine had sent
them. The engine then sends only new ones."""


def read_begun(value: object, choices: int, vocab_size: int) -> list[list[int]]:
    """The tokens that each choice has begun with. Raises RequestError if `value` does not say.

    A list of token ids is for all choices.
    """
    if not isinstance(value, list | tuple):
        raise _refused("must be a list of token ids, or of one such list for each choice")
    lists: list[Any] = list(value)
    if not any(isinstance(entry, list | tuple) for entry in lists):
        lists = [lists] * choices
    if len(lists) != choices:
        raise _refused(f"has {len(lists)} lists, and the request has n={choices}: send one each")
    return [_token_ids(entry, vocab_size) for entry in lists]


def _token_ids(entry: object, vocab_size: int) -> list[int]:
    if not isinstance(entry, list | tuple):
        raise _refused("mixes token ids and lists: send one list, or one for each choice")
    for token in entry:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise _refused(f"must have token ids from 0 to {vocab_size - 1}, not {token!r:.40}")
    return list(entry)


def begun_of(extra_args: Mapping[str, Any] | None, choice: int = 0) -> list[int]:
    """What admission found: the tokens that a choice has begun with; none if it has not begun."""
    begun: list[list[int]] | None = (extra_args or {}).get(BEGUN)
    return begun[choice] if begun else []


def is_unread(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether these have tokens that admission has not seen."""
    return bool((extra_args or {}).get(FIELD))


def check_open(begun: list[list[int]], max_tokens: int, ends: Set[int | None]) -> None:
    """Raise RequestError if a choice cannot go on, because it is complete.

    max_tokens: the most that its output may have.
    ends: the tokens that end a text.
    """
    for tokens in begun:
        if len(tokens) >= max_tokens:
            raise _refused(
                f"has {len(tokens)} tokens, and the output may have at most {max_tokens}: the text"
                " is complete, or raise max_tokens"
            )
        if not ends.isdisjoint(tokens):
            raise _refused("has a token that ends the text: the text is complete")


def _refused(what: str) -> RequestError:
    return RequestError(f"{FIELD} {what}.", FIELD)
