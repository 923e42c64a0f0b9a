"""Late interaction: our token vectors and scores equal those of sentence-transformers 6.

It reads what it has saved itself, and what PyLate and Stanford's ColBERT save.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.oracle import oracle_packages
from cfg_core.errors import ConfigError, RequestError
from cfg_core.prefill_only import Engine
from tests.encoders import tiny_checkpoints as tiny

with oracle_packages():
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

QUERIES = ["waa wab", *tiny.random_texts(6, seed=3, longest=20), "wba"]
DOCUMENTS = ["waa wab wac wad", *tiny.random_texts(10, seed=4, longest=40)]
LIMIT = 2e-5
EXPANSION = {"strategy": "fixed", "length": 24}


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    torch.manual_seed(9)
    config = tiny.config_of(request.param)
    return str(tiny.save(tmp_path / "base", transformers.AutoModel.from_config(config)))


def projection() -> Dense:
    torch.manual_seed(10)
    return Dense(
        *(64, 16),
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )


def saved(folder: Path, base: str, *, normalize: bool = True, **settings: Any) -> Any:
    """A checkpoint as sentence-transformers saves it."""
    words = settings.pop("skiplist_words", ["waa", "wab", "not-a-token"])
    tasks = settings.pop("skiplist_tasks", None)
    prompts = settings.pop("prompts", {"query": "wca ", "document": "wcb "})
    modules = [
        Transformer(base, **settings),
        projection(),
        MultiVectorMask(skiplist_words=words, skiplist_tasks=tasks),
    ]
    if normalize:
        modules.append(Normalize(module_input_name="token_embeddings"))
    oracle = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    oracle.save(str(folder))
    return MultiVectorEncoder(str(folder), device="cpu")


def check(folder: Path, oracle: Any, **options: Any) -> None:
    """Vectors of queries and documents, their scores and ranks."""
    queries = oracle.encode_query(QUERIES, convert_to_numpy=True)
    documents = oracle.encode_document(DOCUMENTS, convert_to_numpy=True)
    with Engine.load(folder, dtype="float32", **options) as engine:
        assert engine.info.tasks == ("token_embed",)
        assert engine.info.token_dimension == queries[0].shape[1]
        for role, texts, expected in (
            ("query", QUERIES, queries),
            ("document", DOCUMENTS, documents),
        ):
            found = engine.embed_tokens(texts, role=role, truncate=True)
            backwards = engine.embed_tokens(texts[::-1], role=role, truncate=True)[::-1]
            assert [len(rows) for rows in found] == [len(rows) for rows in expected]
            for ours, other, theirs in zip(found, backwards, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=LIMIT, rtol=0)
                np.testing.assert_allclose(other, theirs, atol=LIMIT, rtol=0)
        for query, vectors in zip(QUERIES, queries, strict=True):
            scores = engine.rerank(query, DOCUMENTS, truncate=True)
            tensors = [torch.from_numpy(rows) for rows in documents]
            expected = oracle.similarity([torch.from_numpy(vectors)], tensors)[0].numpy()
            np.testing.assert_allclose(scores, expected, atol=1e-4, rtol=0)
            in_our_order = expected[scores.argsort()]
            assert (np.diff(in_our_order) > -EQUAL).all()


EQUAL = 1e-5
"""Scores that are nearer to each other may be in either order: CPUs round sums differently."""

FAMILIES = ["bert", "xlm-roberta", "distilbert", "mpnet", "deberta-v2", "qwen3"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("base", FAMILIES, indirect=True)
@pytest.mark.parametrize("attend", [False, True])
def test_expanded_queries(base, tmp_path, attend):
    expansion = {**EXPANSION, "attend": attend}
    oracle = saved(tmp_path / "saved", base, query_expansion=expansion, document_length=30)
    check(tmp_path / "saved", oracle)


@pytest.mark.parametrize("base", ["modernbert"], indirect=True)
def test_a_window_that_is_longer_than_the_queries(base, tmp_path):
    oracle = saved(tmp_path / "saved", base, query_expansion={"strategy": "fixed", "length": 8})
    check(tmp_path / "saved", oracle)


@pytest.mark.parametrize("base", ["bert"], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"query_length": 9, "document_length": 12},
        {"query_expansion": {"strategy": "min", "length": 6}},
        {"query_expansion": {"strategy": "min", "length": 6}, "query_length": 10},
        {"query_expansion": {**EXPANSION, "token": "wbb"}},
        {"query_expansion": EXPANSION, "skiplist_tasks": ["query", "document"]},
        {"query_expansion": EXPANSION, "skiplist_words": []},
        {"query_expansion": EXPANSION, "prompts": {}},
        {"normalize": False},
    ],
    ids=str,
)
def test_settings(base, tmp_path, settings):
    check(tmp_path / "saved", saved(tmp_path / "saved", base, **settings))


@pytest.mark.parametrize("base", ["bert"], indirect=True)
def test_the_naive_attention_agrees(base, tmp_path):
    oracle = saved(tmp_path / "saved", base, query_expansion=EXPANSION)
    check(tmp_path / "saved", oracle, workflow={"attention": "naive"})


def add_marks(base: str, *marks: str) -> None:
    """Add tokens as PyLate does: their ids are new, and their text is normalised."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([transformers.AddedToken(mark, normalized=True) for mark in marks])
    tokenizer.save_pretrained(base)


@pytest.mark.parametrize("base", ["bert", "modernbert"], indirect=True)
@pytest.mark.parametrize(
    "extra", [{}, {"attend_to_expansion_tokens": True}, {"do_query_expansion": False}], ids=str
)
def test_pylate(base, tmp_path, extra):
    folder = tmp_path / "base"
    add_marks(base, "[Q] ", "[D] ")
    dense = projection()
    (folder / "1_Dense").mkdir()
    dense.save(str(folder / "1_Dense"))
    config = json.loads((folder / "1_Dense" / "config.json").read_text())
    pylate = {key: config[key] for key in ("in_features", "out_features", "bias")}
    pylate["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(pylate))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 9,
        "document_length": 30,
        "skiplist_words": ["waa", *string.punctuation],
        **extra,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    oracle = MultiVectorEncoder(base, device="cpu")
    check(folder, oracle)
    with Engine.load(folder, dtype="float32") as engine:
        assert engine.info.prompts == {"query": "[Q] ", "document": "[D] "}


@pytest.mark.parametrize("base", ["bert"], indirect=True)
@pytest.mark.parametrize(
    "metadata",
    [{}, {"query_maxlen": 20, "doc_maxlen": 25, "attend_to_mask_tokens": True}],
    ids=str,
)
def test_stanford(base, tmp_path, metadata):
    """As colbertv2.0 is saved: the projection beside BERT, and marks that the vocabulary has."""
    folder = tmp_path / "base"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    states = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": value for name, value in states.items()}
    weights["linear.weight"] = projection().linear.weight.detach().clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    marks = {"query_token_id": "wda", "doc_token_id": "wdb"}
    (folder / "artifact.metadata").write_text(json.dumps({**marks, **metadata}))
    check(folder, MultiVectorEncoder(base, device="cpu"))


@pytest.mark.parametrize("base", ["bert", "qwen3"], indirect=True)
def test_bfloat16(base, tmp_path):
    saved(tmp_path / "saved", base, query_expansion=EXPANSION)
    with (
        Engine.load(tmp_path / "saved", dtype="float32") as whole,
        Engine.load(tmp_path / "saved", dtype="bfloat16") as half,
    ):
        for role in ("query", "document"):
            texts = QUERIES if role == "query" else DOCUMENTS
            pairs = (e.embed_tokens(texts, role=role, truncate=True) for e in (whole, half))
            for ours, theirs in zip(*pairs, strict=True):
                assert (ours * theirs).sum(1).min() > 0.998


@pytest.mark.parametrize("base", ["bert"], indirect=True)
def test_what_is_too_long_is_refused(base, tmp_path):
    saved(tmp_path / "saved", base, query_expansion=EXPANSION, document_length=30)
    long = " ".join(["wac"] * 28)
    with Engine.load(tmp_path / "saved", dtype="float32") as engine:
        with pytest.raises(RequestError, match="has 31 tokens and this model takes 24"):
            engine.embed_tokens([long], role="query")
        with pytest.raises(RequestError, match="this model takes 30"):
            engine.embed_tokens([long])
        with pytest.raises(RequestError, match="computes token_embed"):
            engine.embed(["waa"])


@pytest.mark.parametrize("base", ["modernbert"], indirect=True)
def test_a_window_that_is_shorter_than_the_queries_is_refused(base, tmp_path):
    saved(tmp_path / "saved", base, query_expansion=EXPANSION)
    with (
        Engine.load(tmp_path / "saved", dtype="float32") as engine,
        pytest.raises(Exception, match=r"its window of \d+ is shorter"),
    ):
        engine.embed_tokens(["wac"], role="query")


def test_bge_m3_scores_by_its_multi_vectors(tmp_path):
    torch.manual_seed(8)
    path = tiny.save(tmp_path, transformers.AutoModel.from_config(tiny.config_of("xlm-roberta")))
    torch.save(torch.nn.Linear(64, 1).state_dict(), path / "sparse_linear.pt")
    torch.save(torch.nn.Linear(64, 32).state_dict(), path / "colbert_linear.pt")
    with Engine.load(path, dtype="float32") as engine:
        assert (engine.info.max_sim, engine.info.token_dimension) == ("mean", 32)
        (query,) = engine.embed_tokens(QUERIES[:1])
        documents = engine.embed_tokens(DOCUMENTS)
        expected = [(query @ rows.T).max(1).sum() / len(query) for rows in documents]
        np.testing.assert_allclose(engine.rerank(QUERIES[0], DOCUMENTS), expected, atol=1e-6)


@pytest.mark.parametrize("base", ["bert"], indirect=True)
def test_other_modules_are_refused(base, tmp_path):
    saved(tmp_path / "saved", base)
    file = tmp_path / "saved" / "modules.json"
    modules = json.loads(file.read_text())
    file.write_text(json.dumps([*modules, {**modules[-1], "type": "x.HierarchicalTokenPooling"}]))
    with pytest.raises(ConfigError, match="for late interaction, only"):
        Engine.load(tmp_path / "saved")
