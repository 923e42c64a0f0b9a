"""Each family, with packed sequences, against its own padded forward in transformers.

Compared are token states, poolings and heads. transformers runs eager attention.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from cfg_core.errors import CompatibilityError
from cfg_core.prefill_only import Engine
from cfg_core.prefill_only.models.families import (
    BY_RUNS,
    DECODERS,
    ENCODERS,
    FLOAT32_ONLY,
    OWN_ATTENTION,
    REASONS,
)
from tests.encoders import tiny_checkpoints as tiny
from tests.encoders.tiny_checkpoints import padded_states

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa
TEXTS = tiny.random_texts(24, seed=1)
LIMIT = 2e-5
"""Largest allowed difference of a component, in float32. Hidden states have a length of about 8."""


@pytest.fixture(scope="module", params=tiny.SETTINGS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp(request.param)
    return request.param, tiny.save(
        path, transformers.AutoModel.from_config(tiny.config_of(request.param))
    )


def test_every_family_on_the_list_has_a_case():
    assert {kind for kind, _ in tiny.SETTINGS.values()} == {*ENCODERS, *DECODERS, *BY_RUNS}


def test_token_states(case):
    _, path = case
    expected = padded_states(path, TEXTS)
    with Engine.load(path, dtype="float32", max_batch_tokens=512) as engine:
        outputs = engine.run(TEXTS, engine.options("token_embed", normalize=False))
    for output, states in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.values["token_embed"], states, atol=LIMIT, rtol=0)


def test_the_naive_backend_agrees(case):
    name, path = case
    if tiny.SETTINGS[name][0] in OWN_ATTENTION:
        with pytest.raises(CompatibilityError, match="have an attention of their own"):
            Engine.load(path, workflow={"attention": "naive"})
        return
    with (
        Engine.load(path, dtype="float32") as fast,
        Engine.load(path, dtype="float32", workflow={"attention": "naive"}) as oracle,
    ):
        np.testing.assert_allclose(fast.embed(TEXTS), oracle.embed(TEXTS), atol=LIMIT, rtol=0)


def test_bfloat16(case):
    name, path = case
    kind = tiny.SETTINGS[name][0]
    if kind in FLOAT32_ONLY:
        with pytest.raises(CompatibilityError, match="in float32 only"):
            Engine.load(path, dtype="bfloat16")
        with Engine.load(path) as engine:
            assert engine.info.dtype == "float32"
        return
    with (
        Engine.load(path, dtype="float32") as whole,
        Engine.load(path, dtype="bfloat16") as half,
    ):
        cosines = (whole.embed(TEXTS, normalize=True) * half.embed(TEXTS, normalize=True)).sum(1)
    assert cosines.min() > 0.9998


@pytest.mark.parametrize("name", ["gte", "nomic_bert"])
def test_weights_are_as_their_authors_publish_them(name, tmp_path):
    """transformers saves these types with the names and joined projections of their own code."""
    path = tiny.save(tmp_path, transformers.AutoModel.from_config(tiny.config_of(name)))
    names = " ".join(load_file(path / "model.safetensors"))
    assert {"gte": "attention.qkv_proj", "nomic_bert": "attn.Wqkv"}[name] in names
    assert "q_proj" not in names


@pytest.mark.parametrize(
    "pooling", ["cls", "mean", "last", "max", "weightedmean", "mean_sqrt_len_tokens"]
)
def test_poolings(case, pooling):
    _, path = case
    states = padded_states(path, TEXTS)
    with Engine.load(path, dtype="float32", pooling=pooling) as engine:
        vectors = engine.embed(TEXTS)
    expected = np.stack([pooled(rows, pooling) for rows in states])
    np.testing.assert_allclose(vectors, expected, atol=LIMIT * 10, rtol=0)


def pooled(rows: np.ndarray, pooling: str) -> np.ndarray:
    places = np.arange(1, len(rows) + 1)[:, None]
    return {
        "cls": lambda: rows[0],
        "mean": lambda: rows.mean(0),
        "last": lambda: rows[-1],
        "max": lambda: rows.max(0),
        "weightedmean": lambda: (rows * places).sum(0) / places.sum(),
        "mean_sqrt_len_tokens": lambda: rows.sum(0) / len(rows) ** 0.5,
    }[pooling]()


@pytest.mark.parametrize("name", ["gemma", "llama", "ministral3", "mistral", "qwen2", "qwen3"])
def test_bidirectional_decoders(name, tmp_path):
    torch.manual_seed(3)
    path = tiny.save(tmp_path, transformers.AutoModel.from_config(tiny.config_of(name)))
    expected = padded_states(path, TEXTS, causal=False)
    with (
        Engine.load(path, dtype="float32", is_causal=False) as engine,
        Engine.load(path, dtype="float32") as causal,
    ):
        options = engine.options("token_embed", normalize=False)
        outputs, others = engine.run(TEXTS, options), causal.run(TEXTS, options)
    for output, other, states in zip(outputs, others, expected, strict=True):
        np.testing.assert_allclose(output.values["token_embed"], states, atol=LIMIT, rtol=0)
        assert np.abs(other.values["token_embed"] - states).max() > 0.01, (
            "causal and bidirectional must differ"
        )


CLASSIFIERS = [name for name in tiny.SETTINGS if name not in ("mistral-window", "qwen3-window")]


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_and_rerankers(name, num_labels, tmp_path):
    torch.manual_seed(5)
    config = tiny.config_of(name, num_labels=num_labels)
    auto = transformers.AutoModelForSequenceClassification
    path = tiny.save(tmp_path, auto.from_config(config))
    pairs = list(zip(TEXTS[:8], reversed(TEXTS[8:16]), strict=True))
    pairs = [(a[:120].rsplit(" ", 1)[0], b[:120].rsplit(" ", 1)[0]) for a, b in pairs]
    model = auto.from_pretrained(path, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    expected = []
    with torch.inference_mode():
        for pair in pairs:  # one by one: no padding can hide a mistake
            batch = dict(tokenizer(*pair, return_tensors="pt"))
            if not takes_token_types(name):
                batch.pop("token_type_ids", None)
            expected.append(model(**batch).logits[0].numpy())
    with Engine.load(path, dtype="float32") as engine:
        scores = engine.classify(pairs, raw_scores=True)
        activated = engine.classify(pairs)
    np.testing.assert_allclose(scores, np.stack(expected), atol=LIMIT, rtol=0)
    assert np.ptp(scores) > 0.01, "the scores of the pairs must differ"
    if num_labels == 1:
        np.testing.assert_allclose(activated, 1 / (1 + np.exp(-scores)), atol=1e-6)
    else:
        np.testing.assert_allclose(activated.sum(1), 1, atol=1e-6)
        assert (activated.argmax(1) == scores.argmax(1)).all()


def takes_token_types(name: str) -> bool:
    return tiny.SETTINGS[name][1].get("type_vocab_size", 0) > 1


def test_the_page_has_every_case():
    page = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    shown = {f"`{kind}`" if case == kind else f"`{kind}` ({case})" for case, kind in cases()}
    assert shown <= set(rows)
    assert {f"`{kind}`" for kind in REASONS} <= set(rows)


def cases() -> list[tuple[str, str]]:
    return [(case, kind) for case, (kind, _) in tiny.SETTINGS.items()]


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "distilbert", "modernbert"])
def test_splade(name, tmp_path):
    torch.manual_seed(6)
    path = tiny.save(tmp_path, transformers.AutoModelForMaskedLM.from_config(tiny.config_of(name)))
    model = transformers.AutoModelForMaskedLM.from_pretrained(
        path, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with Engine.load(path, dtype="float32", pooling="splade") as engine:
        vectors = engine.embed_sparse(TEXTS[:6])
    for text, vector in zip(TEXTS[:6], vectors, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            weights = model(input_ids=ids).logits[0].relu().log1p().amax(0)
        assert vector.token_ids.tolist() == weights.nonzero()[:, 0].tolist()
        np.testing.assert_allclose(vector.weights, weights[weights > 0].numpy(), atol=LIMIT, rtol=0)


def test_bge_m3_gives_three_outputs_from_one_forward(tmp_path):
    torch.manual_seed(8)
    path = tiny.save(tmp_path, transformers.AutoModel.from_config(tiny.config_of("xlm-roberta")))
    sparse, colbert = torch.nn.Linear(64, 1), torch.nn.Linear(64, 64)
    torch.save(sparse.state_dict(), path / "sparse_linear.pt")
    torch.save(colbert.state_dict(), path / "colbert_linear.pt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with Engine.load(path, dtype="float32") as engine:
        assert engine.info.tasks == ("embed", "sparse", "token_embed")
        outputs = engine.run(TEXTS, engine.options("embed", "sparse", "token_embed"))
    for text, rows, output in zip(TEXTS, padded_states(path, TEXTS), outputs, strict=True):
        with torch.inference_mode():
            weights = torch.relu(sparse(torch.from_numpy(rows)))[:, 0].tolist()
            vectors = torch.nn.functional.normalize(
                colbert(torch.from_numpy(rows[1:])), dim=-1
            ).numpy()
        np.testing.assert_allclose(
            output.values["embed"], rows[0] / np.linalg.norm(rows[0]), atol=LIMIT
        )
        np.testing.assert_allclose(output.values["token_embed"], vectors, atol=LIMIT)
        largest: dict[int, float] = {}
        for token, weight in zip(tokenizer(text)["input_ids"], weights, strict=True):
            if token not in tokenizer.all_special_ids and weight > 0:
                largest[token] = max(weight, largest.get(token, 0))
        assert output.values["sparse"].token_ids.tolist() == sorted(largest)
        np.testing.assert_allclose(
            output.values["sparse"].weights, [largest[t] for t in sorted(largest)], atol=LIMIT
        )
