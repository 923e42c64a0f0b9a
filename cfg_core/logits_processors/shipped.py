"""Three factories that are useful as they are, and that show how to write one."""

from __future__ import annotations

import re
import reprlib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cfg_core.logits_processors.base import (
    EngineInfo,
    LogitsProcessor,
    LogitsProcessorFactory,
    SequenceInfo,
)

FORBIDDEN = -torch.inf
_MAX_NGRAM = 64
_MAX_TEXT = 1000
_CACHED_GATES = 64
_CACHED_TEXTS = 1024


def _check_count(name: str, value: object, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise ValueError(
            f"{name} must be an integer of at least {least}, not {reprlib.repr(value)}"
        )


def _check_text(name: str, value: object) -> str:
    """Return `value` if it is text, and short enough not to delay other requests."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT:
        raise ValueError(f"{name} must be text of 1 to {_MAX_TEXT} characters")
    return value


class NoRepeatNgram(LogitsProcessorFactory):
    """Allows no run of `n` tokens to occur twice in the output.

    It is like `no_repeat_ngram_size` of transformers, except that the prompt does not count.
    """

    def check(self, *, n: int) -> None:
        _check_count("n", n)
        if n > _MAX_NGRAM:
            raise ValueError(f"n must be at most {_MAX_NGRAM}")

    def make(self, sequence: SequenceInfo, *, n: int) -> LogitsProcessor:
        return _NoRepeatNgram(n)


class _NoRepeatNgram(LogitsProcessor):
    def __init__(self, n: int) -> None:
        self._last: tuple[int, ...] = ()
        self._behind: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._n = n
        self._journal: list[tuple[int, ...]] = []

    def __call__(self, scores: Tensor) -> Tensor:
        if len(self._last) == self._n - 1 and self._last in self._behind:
            scores[self._behind[self._last]] = FORBIDDEN
        return scores

    def accept(self, token: int) -> None:
        if len(self._last) == self._n - 1:
            self._behind[self._last].append(token)
            self._journal.append(self._last)
        self._last = (*self._last, token)[-(self._n - 1) :] if self._n > 1 else ()

    def snapshot(self) -> Any:
        return len(self._journal), self._last

    def restore(self, state: Any) -> None:
        length, self._last = state
        while len(self._journal) > length:
            self._behind[self._journal.pop()].pop()


class SectionBudget(LogitsProcessorFactory):
    """Allows at most `max_tokens` tokens between `start` and `end`, and then forces `end`.

    start, end: text. Without `start` the section begins with the output. After a section has ended,
        `start` begins another one, with a new budget.
    """

    def __init__(self, engine: EngineInfo) -> None:
        super().__init__(engine)
        self._ids = lru_cache(maxsize=_CACHED_TEXTS)(self._encode)

    def check(self, *, max_tokens: int, end: str, start: str | None = None) -> None:
        _check_count("max_tokens", max_tokens, least=0)
        for name, text in (("end", end), *([("start", start)] if start is not None else [])):
            if not self._ids(_check_text(name, text)):
                raise ValueError(f"{name} must have at least one token")

    def forces(self, *, max_tokens: int, end: str, start: str | None = None) -> Sequence[int]:
        return self._ids(end)

    def make(
        self, sequence: SequenceInfo, *, max_tokens: int, end: str, start: str | None = None
    ) -> LogitsProcessor:
        return _SectionBudget(
            max_tokens, self._ids(end), None if start is None else self._ids(start)
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer().encode(text, add_special_tokens=False))


class _SectionBudget(LogitsProcessor):
    def __init__(
        self, max_tokens: int, end: tuple[int, ...], start: tuple[int, ...] | None
    ) -> None:
        self._max_tokens, self._end, self._start = max_tokens, end, start
        self._inside = start is None
        self._output: list[int] = []
        self._used = 0  # tokens of the section so far
        self._forced = 0  # tokens of `end` that were forced so far

    def __call__(self, scores: Tensor) -> Tensor:
        if self._inside and self._used >= self._max_tokens:
            wanted = self._end[self._forced]
            score = scores[wanted].clone()
            scores.fill_(FORBIDDEN)
            scores[wanted] = score
        return scores

    def accept(self, token: int) -> None:
        self._output.append(token)
        if not self._inside:
            self._inside = self._start is not None and self._ends_with(self._start)
            return
        if self._used >= self._max_tokens and token == self._end[self._forced]:
            self._forced += 1
        else:
            self._used += 1
        if self._forced == len(self._end) or self._ends_with(self._end):
            self._inside, self._used, self._forced = False, 0, 0

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return tuple(self._output[-len(ids) :]) == ids

    def snapshot(self) -> Any:
        return len(self._output), self._inside, self._used, self._forced

    def restore(self, state: Any) -> None:
        length, self._inside, self._used, self._forced = state
        del self._output[length:]


class VocabularyGate(LogitsProcessorFactory):
    """Allows only tokens whose text consists of `characters`, and end-of-sequence tokens.

    characters: the inside of a regular expression's character class, such as `a-zA-Z0-9 .,` or
        `\\w\\s`. A whole expression is not accepted, because some take hours to match.

    A token that holds only a part of a character decodes to U+FFFD, the replacement character, and
    is allowed only if `characters` includes that.
    """

    def __init__(self, engine: EngineInfo) -> None:
        super().__init__(engine)
        self._masks = lru_cache(maxsize=_CACHED_GATES)(self._forbidden)
        self._texts: list[str] = []

    def check(self, *, characters: str) -> None:
        if set(_check_text("characters", characters)) & {"[", "]"}:
            raise ValueError("characters must be text such as a-zA-Z0-9, without brackets")
        self._masks(characters)

    def make(self, sequence: SequenceInfo, *, characters: str) -> LogitsProcessor:
        return _VocabularyGate(self._masks(characters))

    def _forbidden(self, characters: str) -> Tensor:
        """Return [vocabulary] bool: True for tokens that may not be sampled."""
        try:
            compiled = re.compile(f"[{characters}]+")
        except re.error as error:
            raise ValueError(f"characters is not a valid character class: {error}") from None
        if not self._texts:
            self._texts = self.engine.tokenizer().batch_decode(
                [[i] for i in range(self.engine.vocab_size)]
            )
        mask = torch.tensor([compiled.fullmatch(text) is None for text in self._texts])
        if bool(mask.all()):
            raise ValueError("this model has no token that consists only of these characters")
        mask[[i for i in self.engine.end_token_ids if i < len(mask)]] = False
        return mask


class _VocabularyGate(LogitsProcessor):
    def __init__(self, forbidden: Tensor) -> None:
        self._forbidden = forbidden

    def __call__(self, scores: Tensor) -> Tensor:
        self._forbidden = self._forbidden.to(scores.device)
        return scores.masked_fill(self._forbidden, FORBIDDEN)

    def snapshot(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass
