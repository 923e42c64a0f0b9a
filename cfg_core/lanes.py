"""Thread pools for work on texts: a short text never waits behind a long one.

Long texts have a single thread, so only one of them is worked on at a time. Tokenizing takes one to
two microseconds per character. It does not block the event loop as long as the tokenizer releases
the GIL. A text of two megabytes takes seconds. If a client sends twenty such texts at once, they
are tokenized one after another. The other lane and the other CPU cores stay free for other clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from cfg_core.memory import DelayedTrim

T = TypeVar("T")

LONG_TEXT = 50_000
"""A text with more characters than this goes to the lane for long texts."""

LARGE_TEXT = 500_000
"""After work on more characters than this, freed memory is returned to the system (memory.py)."""


class Lanes:
    """Two thread pools: a lane for short texts, and a lane with one thread for long texts.

    num_short: number of threads in the lane for short texts.
    """

    def __init__(self, name: str, num_short: int = 1) -> None:
        self._short = ThreadPoolExecutor(num_short, f"{name}-short")
        self._long = ThreadPoolExecutor(1, f"{name}-long")
        self._trim = DelayedTrim()

    def submit(
        self, num_chars: int, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> Future[T]:
        """Submit `function(*args, **kwargs)` to the lane for work on `num_chars` characters.

        It may be called from any thread.
        """
        lane = self._long if num_chars > LONG_TEXT else self._short
        future = lane.submit(function, *args, **kwargs)
        if num_chars > LARGE_TEXT:
            future.add_done_callback(lambda _: self._trim.schedule())
        return future

    async def run(self, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """Submit a job as `submit` does, and await its result.

        Cancelling the call before the job begins drops the job.
        """
        return await asyncio.wrap_future(self.submit(num_chars, function, *args))

    def close(self) -> None:
        """Drop the jobs that wait, and do not interrupt those that run."""
        self._trim.close()
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def num_chars(value: object) -> int:
    """Return the number of characters of all texts inside lists and objects.

    Each entry of a list that begins with an integer counts four characters, about the text of a
    token. Other numbers do not count.
    """
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
