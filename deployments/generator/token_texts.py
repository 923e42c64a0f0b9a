"""Texts of single tokens, for logprobs: each token is decoded once.

vLLM decodes every candidate of every token anew, one by one. With 20 logprobs this takes 0.35 ms a
token, on the event loop of the replica. A token's text depends on the tokenizer alone. Where its
bytes are not a whole character, vLLM corrects the text afterwards, by the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

Decode = Callable[[Any, list[int]], list[str]]


class TokenTexts:
    """Stands in for `convert_ids_list_to_tokens`.

    It keeps each text that was ever asked for, which is one vocabulary at most.
    """

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
        return [texts[token] for token in token_ids]  # a new list, because vLLM changes it
