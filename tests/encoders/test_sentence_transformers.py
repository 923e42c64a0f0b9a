"""Directories that sentence-transformers has saved.

Our vectors and scores equal its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from benchmarks.oracle import oracle_packages
from cfg_core.errors import RequestError
from cfg_core.prefill_only import Engine
from tests.encoders import tiny_checkpoints as tiny

with oracle_packages():
    from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

TEXTS = tiny.random_texts(20, seed=9, longest=60)
PROMPTS = {"query": "waa wab wac ", "document": "wba "}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("bert")
    return str(tiny.save(path, transformers.AutoModel.from_config(tiny.config_of("bert"))))


def saved(folder, modules, **settings) -> SentenceTransformer:
    model = SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save(str(folder))
    return model


def dense() -> Dense:
    torch.manual_seed(3)
    return Dense(64, 24, activation_function=torch.nn.Tanh())


@pytest.mark.parametrize(
    ("pooling", "after"),
    [
        ("mean", [Normalize()]),
        ("cls", []),
        ("lasttoken", [Normalize()]),
        (("mean", "max"), [Normalize()]),
        ("weightedmean", []),
        ("mean", [dense(), Normalize()]),
    ],
    ids=["mean", "cls", "last", "two", "weighted", "dense"],
)
def test_vectors(bert, tmp_path, pooling, after):
    oracle = saved(tmp_path, [Transformer(bert), Pooling(64, pooling), *after])
    with Engine.load(tmp_path, dtype="float32") as engine:
        vectors = engine.embed(TEXTS)
    assert vectors.shape[1] == engine.info.dimension
    np.testing.assert_allclose(vectors, oracle.encode(TEXTS), atol=2e-5)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(bert, tmp_path, include_prompt):
    modules = [Transformer(bert), Pooling(64, "mean", include_prompt=include_prompt), Normalize()]
    oracle = saved(tmp_path, modules, prompts=PROMPTS, default_prompt_name="document")
    with Engine.load(tmp_path, dtype="float32") as engine:
        for options in ({}, {"prompt_name": "query"}, {"prompt": "wcc wcd "}, {"prompt": ""}):
            expected = oracle.encode(TEXTS, **options)
            np.testing.assert_allclose(
                engine.embed(TEXTS, **options), expected, atol=2e-5, err_msg=str(options)
            )
        with pytest.raises(
            RequestError, match="has no prompt named 'passage': it has document, query"
        ):
            engine.embed(TEXTS, prompt_name="passage")


def test_all_mpnet(tmp_path):
    """As all-mpnet-base-v2 is saved: mean pooling, normalised, fewer tokens than positions."""
    torch.manual_seed(6)
    base = tiny.save(tmp_path / "base", transformers.AutoModel.from_config(tiny.config_of("mpnet")))
    modules = [Transformer(str(base), max_seq_length=40), Pooling(64, "mean"), Normalize()]
    oracle = saved(tmp_path / "saved", modules)
    with Engine.load(tmp_path / "saved", dtype="float32") as engine:
        vectors = engine.embed(TEXTS, truncate=True)
        backwards = engine.embed(TEXTS[::-1], truncate=True)[::-1]
    expected = oracle.encode(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=2e-5)
    np.testing.assert_allclose(backwards, expected, atol=2e-5)
    assert (vectors * expected).sum(1).min() > 0.99999


def test_embedding_gemma(tmp_path):
    """As embeddinggemma-300m is saved: bidirectional, two Dense layers, prompts."""
    torch.manual_seed(6)
    config = tiny.config_of("embeddinggemma")
    base = tiny.save(tmp_path / "base", transformers.AutoModel.from_config(config))
    identity = torch.nn.Identity()
    layers = [
        Dense(64, 96, bias=False, activation_function=identity),
        Dense(96, 64, bias=False, activation_function=identity),
    ]
    modules = [Transformer(str(base)), Pooling(64, "mean"), *layers, Normalize()]
    oracle = saved(tmp_path / "saved", modules, prompts=PROMPTS)
    with Engine.load(tmp_path / "saved", dtype="float32") as engine:
        for options in ({}, {"prompt_name": "query"}):
            expected = oracle.encode(TEXTS, **options)
            np.testing.assert_allclose(engine.embed(TEXTS, **options), expected, atol=2e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_deberta_reranker(tmp_path):
    torch.manual_seed(4)
    config = tiny.config_of("deberta-v2", num_labels=1)
    auto = transformers.AutoModelForSequenceClassification
    path = str(tiny.save(tmp_path, auto.from_config(config)))
    with Engine.load(path, dtype="float32") as engine:
        scores = engine.rerank(TEXTS[0], TEXTS[1:])
    pairs = [(TEXTS[0], text) for text in TEXTS[1:]]
    expected = CrossEncoder(path, device="cpu").predict(pairs)
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    assert (scores.argsort() == expected.argsort()).all()


def test_max_seq_length(bert, tmp_path):
    oracle = saved(tmp_path, [Transformer(bert, max_seq_length=12), Pooling(64, "mean")])
    with Engine.load(tmp_path, dtype="float32") as engine:
        assert engine.info.max_input_tokens == 12
        np.testing.assert_allclose(
            engine.embed(TEXTS, truncate=True), oracle.encode(TEXTS), atol=2e-5
        )


def test_a_cross_encoder(tmp_path):
    torch.manual_seed(4)
    config = tiny.config_of("bert", num_labels=1)
    path = str(
        tiny.save(tmp_path, transformers.AutoModelForSequenceClassification.from_config(config))
    )
    pairs = [(TEXTS[0], text) for text in TEXTS[1:]]
    with Engine.load(path, dtype="float32") as engine:
        scores = engine.rerank(TEXTS[0], TEXTS[1:])
    np.testing.assert_allclose(scores, CrossEncoder(path, device="cpu").predict(pairs), atol=2e-5)


def test_a_sparse_encoder(tmp_path):
    torch.manual_seed(5)
    (tmp_path / "mlm").mkdir()
    path = str(
        tiny.save(
            tmp_path / "mlm", transformers.AutoModelForMaskedLM.from_config(tiny.config_of("bert"))
        )
    )
    oracle = SparseEncoder(modules=[MLMTransformer(path), SpladePooling("max")], device="cpu")
    oracle.save(str(tmp_path / "splade"))
    expected = oracle.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    with Engine.load(tmp_path / "splade", dtype="float32") as engine:
        assert engine.info.tasks == ("sparse",)
        for vector, row in zip(engine.embed_sparse(TEXTS), expected, strict=True):
            assert vector.token_ids.tolist() == row.nonzero()[0].tolist()
            np.testing.assert_allclose(vector.weights, row[row != 0], atol=2e-5)
