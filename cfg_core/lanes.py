"""Threads for work on texts: a short text never waits behind a long one, and one long text is
worked on at a time.

Tokenizing takes one to two microseconds for each character, beside the event loop as long as the
tokenizer lets go of Python's lock. Two megabytes take seconds; whoever sends twenty of them at once
has them one after another, and leaves the other lane, and the other cores, to the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from cfg_core.memory import Rest

T = TypeVar("T")

LONG_TEXT = 50_000
"""Characters. More go to the lane of long texts."""

LARGE_TEXT = 500_000
"""Characters. What work on more leaves in the C library's hands is given back to the system."""


class Lanes:
    """Two pools of threads."""

    def __init__(self, name: str, num_short: int = 1) -> None:
        self._short = ThreadPoolExecutor(num_short, f"{name}-short")
        self._long = ThreadPoolExecutor(1, f"{name}-long")
        self._rest = Rest()

    def submit(
        self, num_chars: int, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> Future[T]:
        """`function` in the lane for work on so many characters. For any thread."""
        lane = self._long if num_chars > LONG_TEXT else self._short
        future = lane.submit(function, *args, **kwargs)
        if num_chars > LARGE_TEXT:
            future.add_done_callback(lambda _: self._rest.after_large_work())
        return future

    async def run(self, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """As `submit`, awaited. Cancelling it before the job begins drops the job."""
        return await asyncio.wrap_future(self.submit(num_chars, function, *args))

    def close(self) -> None:
        """Jobs that wait are dropped; those that run end by themselves."""
        self._rest.close()
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def num_chars(value: object) -> int:
    """Characters of all texts inside lists and objects; a number counts as four, about the text of
    a token."""
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
