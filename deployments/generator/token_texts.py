"""Texts of single tokens, for logprobs: each token is decoded once.

vLLM decodes every candidate of every token anew, one by one: with 20 logprobs 0.35 ms a token, on
the event loop of the replica. What a token's text is depends on the tokenizer alone; bytes that are
no whole character vLLM corrects afterwards, by what stands before.

Importing it imports vllm: only a replica does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

Decode = Callable[[Any, list[int]], list[str]]


class TokenTexts:
    """Stands in for `convert_ids_list_to_tokens`. Holds each text that was ever asked for: a
    vocabulary at most."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        texts = self._texts.get(tokenizer)
        if texts is None:
            texts = self._texts[tokenizer] = {}
        missing = [token for token in token_ids if token not in texts]
        if missing:
            texts.update(zip(missing, self.decode(tokenizer, missing), strict=True))
        return [texts[token] for token in token_ids]  # vLLM changes the list
