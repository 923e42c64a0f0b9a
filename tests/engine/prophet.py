"""A drafter of vLLM's method `custom_class` that knows how texts go on."""

from __future__ import annotations

from typing import Any

import numpy as np

KNOWN: list[list[int]] = []
"""Prompts with their texts."""

WRONG_EVERY = 0
"""Drafts for every so many places are wrong. 0: none is."""


class Prophet:
    """Drafts what follows in KNOWN. It knows nothing of negatives."""

    def __init__(self, config: Any) -> None:
        self._number = config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any) -> None:
        """vLLM calls it."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens: np.ndarray,
        token_ids: np.ndarray,
        **_: Any,
    ) -> list[list[int]]:
        """The drafts of each request. `token_ids` [batch, length] are those so far."""
        return [
            self._next(token_ids[row, : num_tokens[row]].tolist()) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _next(self, tokens: list[int]) -> list[int]:
        number = len(tokens)
        whole = next((text for text in KNOWN if text[:number] == tokens), [])
        drafts = whole[number : number + self._number]
        return [_drafted(place, token) for place, token in enumerate(drafts, number)]


def _drafted(place: int, token: int) -> int:
    """The draft for a place whose token is known."""
    is_wrong = WRONG_EVERY and place % WRONG_EVERY == 0
    return (token - 1 if token else 1) if is_wrong else token
