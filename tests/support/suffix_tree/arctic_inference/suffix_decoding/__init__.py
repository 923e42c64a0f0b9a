"""What vLLM's drafter for suffix decoding uses of arctic-inference, without its tree.

A draft is what followed the last token where it stood before, in the text of the same request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class Draft:
    token_ids: list[int]


class SuffixDecodingCache:
    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self._texts: dict[str, list[int]] = {}
        self.cached_requests: set[str] = set()

    @property
    def active_requests(self) -> set[str]:
        return set(self._texts)

    def start_request(self, req_id: str, prompt_token_ids: Iterable[int]) -> None:
        self._texts[req_id] = [int(token) for token in prompt_token_ids]

    def add_active_response(self, req_id: str, token_ids: Sequence[int]) -> None:
        self._texts[req_id] += token_ids

    def stop_request(self, req_id: str) -> None:
        del self._texts[req_id]
        self.cached_requests.add(req_id)

    def evict_cached_response(self, req_id: str) -> None:
        self.cached_requests.remove(req_id)

    def speculate(
        self, req_id: str, pattern: Sequence[int], max_spec_tokens: int, **_options: float
    ) -> Draft:
        text = self._texts[req_id]
        assert text[-1] == pattern[-1], "the drafter has seen each token of the text"
        places = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
        start = places[-1] + 1 if places else len(text)
        return Draft(text[start : start + max_spec_tokens])
