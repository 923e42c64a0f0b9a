"""The model of configs/cfg.yaml gives the tokens of Hugging Face `generate` with guidance.

The other models of this folder have random weights. This one has real ones, 30 layers, and
instructions that guidance is meant for. Greedy decoding in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.engine.engines import Engine, differences
from tests.engine.oracle import MIN_MARGIN, Case, Oracle, rounding, top_gap_along

NEW_TOKENS = 32
HELPFUL = "You are a helpful assistant."
REQUESTS = (
    ("You are a pirate.", "How do I make tea?", 1.5),
    ("Answer in only one short sentence.", "What is a volcano?", 2.5),
    ("You are very pessimistic and sad.", "How will the weather be?", 1.5),
    ("You are a poet.", "Tell me about the sea.", 0.5),
)
"""(system message, question, scale); the negative is the same question to a helpful assistant."""


@pytest.fixture(scope="module")
def cases(chat_model: Path) -> list[Case]:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)

    def ids(system: str, question: str) -> tuple[int, ...]:
        roles = {"system": system, "user": question}
        chat = [{"role": role, "content": text} for role, text in roles.items()]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(text).input_ids)

    return [Case(ids(s, q), ids(HELPFUL, q), scale) for s, q, scale in REQUESTS]


@pytest.fixture(scope="module")
def expected(chat_model: Path, cases: list[Case]) -> list[list[int]]:
    """Hugging Face's texts. Rounding decides none of their tokens."""
    oracle = Oracle(chat_model)
    texts = [
        oracle.hf(c.prompt, scale=c.scale, negative=c.negative, max_new_tokens=NEW_TOKENS)
        for c in cases
    ]
    for case, text in zip(cases, texts, strict=True):
        assert top_gap_along(oracle.model, case, text) > MIN_MARGIN * rounding(case.scale)
    plain = oracle.hf(cases[0].prompt, max_new_tokens=8)
    assert plain != texts[0][:8], "guidance must change the text"
    return texts


@pytest.fixture(scope="module")
def engine(chat_model: Path) -> Iterator[Engine]:
    engine = Engine(chat_model, kv_cache_memory_bytes=128 << 20)
    yield engine
    engine.close()


def test_in_one_batch(engine: Engine, cases: list[Case], expected: list[list[int]]) -> None:
    assert differences(engine.guide(cases, max_tokens=NEW_TOKENS), expected) == []


def test_alone(engine: Engine, cases: list[Case], expected: list[list[int]]) -> None:
    assert differences(engine.guide(cases[:1], max_tokens=NEW_TOKENS), expected[:1]) == []
