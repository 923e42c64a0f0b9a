"""Threads for work on texts: a short text never waits behind a long one, and one long text is worked on at a time.

Tokenizing takes one to two microseconds for each character, beside the event loop as long as the tokenizer lets go of
Python's lock. Two megabytes take seconds; whoever sends twenty of them at once has them one after another, and leaves
the other lane, and the other cores, to the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

LONG_TEXT = 50_000
"""Characters. More go to the lane of long texts."""


class Lanes:
    """Two pools of threads. `run` is used from an event loop; jobs that are cancelled before they begin never run."""

    def __init__(self, name: str, num_short: int = 1) -> None:
        self._short = ThreadPoolExecutor(num_short, f"{name}-short")
        self._long = ThreadPoolExecutor(1, f"{name}-long")

    def lane(self, num_chars: int) -> ThreadPoolExecutor:
        return self._long if num_chars > LONG_TEXT else self._short

    async def run(self, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in the lane for work on so many characters."""
        return await asyncio.get_running_loop().run_in_executor(self.lane(num_chars), function, *args)

    def close(self) -> None:
        """Jobs that wait are dropped; those that run end by themselves."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def num_chars(value: object) -> int:
    """Characters of all texts inside lists and objects; a number counts as four, about the text of a token."""
    total, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            if item and isinstance(item[0], int):
                total += 4 * len(item)
            else:
                rest.extend(item)
    return total
