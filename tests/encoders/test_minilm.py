"""MiniLM-L6 with its real weights, against sentence-transformers: vectors, packing, retrieval."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.oracle import oracle_packages
from cfg_core.errors import RequestError
from cfg_core.prefill_only import Engine
from cfg_core.prefill_only.models.cpu_linear import rows_of
from cfg_core.prefill_only.vector_formats import converted

with oracle_packages():
    from sentence_transformers import SentenceTransformer

LINES = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
PAIRS = [(line["question"], line["passage"]) for line in map(json.loads, LINES)]
"""Questions, and the passage that answers each. Other passages are near misses."""


@pytest.fixture(scope="module")
def engine(minilm_path: str) -> Iterator[Engine]:
    with Engine.load(minilm_path, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(minilm_path: str) -> SentenceTransformer:
    return SentenceTransformer(minilm_path, device="cpu")


@pytest.fixture(scope="module")
def texts(minilm_path: str) -> list[str]:
    """500 texts of 3 to 256 tokens, with words of the model's vocabulary and of the passages."""
    generator = random.Random(11)
    words = " ".join(text for pair in PAIRS for text in pair).split()
    return [
        " ".join(generator.choices(words, k=round(200 ** generator.random()))) for _ in range(500)
    ]


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_the_texts_have_all_lengths(engine, texts):
    lengths = [len(engine._pipeline.tokenizer.token_ids(text)) for text in texts]
    assert min(lengths) == 3
    assert 200 < max(lengths) <= 256
    assert len(set(lengths)) > 80


def test_the_vectors_are_those_of_sentence_transformers(engine, oracle, texts):
    vectors = engine.embed(texts, show_progress=False)
    expected = oracle.encode(texts, show_progress_bar=False)
    assert vectors.dtype == np.float32
    assert cosines(vectors, expected).min() > 0.99999
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_text_alone_is_the_same_as_among_63_others(engine, texts):
    together = engine.embed(texts[:64])
    alone = np.stack([engine.embed(text) for text in texts[:64]])
    assert np.abs(together - alone).max() < 1e-5


def test_the_number_of_rows_takes_few_values(minilm_path, texts):
    """oneDNN keeps a kernel for each number of rows.

    Before the numbers were rounded, these took 600 MB within two minutes.
    """
    seen = set()
    with Engine.load(minilm_path, dtype="float32") as engine:
        backbone = engine._pipeline._runner._backbone
        backbone.register_forward_pre_hook(
            lambda *a: seen.add(a[-1]["input_ids"].shape[1]), with_kwargs=True
        )
        for text in texts[:40]:
            engine.embed(text)
    assert len(seen) > 3
    assert all(rows == rows_of(rows) for rows in seen)


def test_truncation_is_that_of_sentence_transformers(engine, oracle):
    text = " ".join(passage for _, passage in PAIRS)
    with pytest.raises(
        RequestError, match=r"input 0 has \d+ tokens and this model takes 256: .*truncate=True"
    ):
        engine.embed([text])
    np.testing.assert_allclose(
        engine.embed([text], truncate=True), oracle.encode([text]), atol=1e-5
    )


def test_bfloat16_is_close(minilm_path, engine, texts):
    questions, passages = zip(*PAIRS, strict=True)
    with Engine.load(minilm_path, dtype="bfloat16") as half:
        assert half.info.dtype == "bfloat16"
        assert cosines(half.embed(texts[:64]), engine.embed(texts[:64])).min() > 0.999
        found = recall_at_1(half.embed(questions), half.embed(passages))
    assert found == recall_at_1(engine.embed(questions), engine.embed(passages))


def test_vectors_of_bytes_find_the_same(engine, texts):
    questions, passages = (engine.embed(list(side)) for side in zip(*PAIRS, strict=True))
    vectors = engine.embed(texts[:64])
    whole = converted(vectors, "int8").astype(np.float32)
    assert cosines(whole / np.linalg.norm(whole, axis=1, keepdims=True), vectors).min() > 0.999
    assert (np.abs(whole) == 127).mean() < 1e-4, "hardly any component is cut"
    both = (converted(side, "int8").astype(np.float32) for side in (questions, passages))
    assert recall_at_1(*both) == recall_at_1(questions, passages)


def test_retrieval(engine, oracle):
    questions, passages = zip(*PAIRS, strict=True)
    ours = recall_at_1(engine.embed(questions), engine.embed(passages))
    assert ours == recall_at_1(oracle.encode(questions), oracle.encode(passages))
    assert ours > 0.9


def recall_at_1(questions: np.ndarray, passages: np.ndarray) -> float:
    return float(((questions @ passages.T).argmax(1) == np.arange(len(questions))).mean())
