"""A logits processor that fails in the middle of a text. Tests install it in a server."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cfg_core.logits_processors.base import LogitsProcessor, LogitsProcessorFactory, SequenceInfo


class Breaks(LogitsProcessorFactory):
    """`{"name": ..., "after": n}` raises as soon as the text has n tokens."""

    def check(self, *, after: int) -> None:
        pass

    def make(self, sequence: SequenceInfo, *, after: int) -> LogitsProcessor:
        return _Breaks(after)


class _Breaks(LogitsProcessor):
    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, scores: Tensor) -> Tensor:
        if self._left <= 0:
            raise RuntimeError("failed on purpose")
        return scores

    def accept(self, token: int) -> None:
        self._left -= 1

    def snapshot(self) -> Any:
        return self._left

    def restore(self, state: Any) -> None:
        self._left = state
