"""Logits processors together with a mask.

Whose fault it is when no token is left, and which tokens a processor may force.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cfg_core.errors import REQUEST_FAULT
from cfg_core.logits_processors.base import EngineInfo, LogitsProcessor
from cfg_core.logits_processors.registry import Registry
from cfg_core.logits_processors.sequences import ProcessorError, SequenceProcessors


class Letters:
    """A tokenizer of one token for each letter."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(char) - ord("a") for char in text]


class Only(LogitsProcessor):
    """Forbids all tokens but some."""

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = allowed

    def __call__(self, scores: Tensor) -> Tensor:
        kept = scores[self._allowed].clone()
        scores.fill_(-torch.inf)
        scores[self._allowed] = kept
        return scores


def reason(allowed: list[int], masked: list[int]) -> str:
    row = torch.zeros(6)
    row[masked] = -torch.inf
    processors = SequenceProcessors(lambda: [("only", Only(allowed))])
    with pytest.raises(ProcessorError) as failed:
        processors.process([row], drafts=[])
    return str(failed.value)


def test_no_token_left_by_processor_and_mask_is_the_fault_of_the_request() -> None:
    assert reason([2, 3], masked=[2, 3]).startswith(REQUEST_FAULT)


def test_no_token_left_by_the_processor_alone_is_the_fault_of_the_processor() -> None:
    assert not reason([], masked=[]).startswith(REQUEST_FAULT)
    assert not reason([], masked=[1]).startswith(REQUEST_FAULT)


def test_the_registry_returns_the_tokens_that_processors_force() -> None:
    registry = Registry.load({}, EngineInfo(26, Letters))
    asked: list[dict[str, Any]] = [
        {"name": "no_repeat_ngram", "n": 2},
        {"name": "section_budget", "max_tokens": 3, "end": "xyz"},
        {"name": "section_budget", "max_tokens": 9, "end": "ab"},
    ]
    assert [(name, list(tokens)) for name, tokens in registry.forced(asked)] == [
        ("section_budget", [23, 24, 25]),
        ("section_budget", [0, 1]),
    ]
