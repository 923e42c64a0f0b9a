"""PromptHashes: the block hashes of prompts that many requests have, such as one negative of all.

vLLM hashes a prompt block by block in Python, for each request again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MOST_BYTES = 2**24
"""Bytes of prompts whose hashes are kept: those of four million tokens."""


class PromptHashes:
    """Block hashes by the content of a prompt. The least recently used are forgotten.

    most_bytes: how many bytes of prompts are kept. A longer prompt is not kept at all.

    May be called from any thread: what two of them do at once is only done twice.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._known: OrderedDict[tuple[bytes, Hashable], tuple[Any, ...]] = OrderedDict()

    def of(self, prompt: bytes, others: Hashable, compute: Callable[[], list[Any]]) -> list[Any]:
        """The hashes of a prompt: `compute()`, or what it returned for an equal prompt.

        The caller may change the list.

        others: what else the hashes depend on.
        """
        key = (prompt, others)
        hashes = self._known.pop(key, None)
        if hashes is None:
            hashes = tuple(compute())
            self._num_bytes += len(prompt)
        self._known[key] = hashes
        while self._num_bytes > self._most_bytes:
            (forgotten, _), _ = self._known.popitem(last=False)
            self._num_bytes -= len(forgotten)
        return list(hashes)
