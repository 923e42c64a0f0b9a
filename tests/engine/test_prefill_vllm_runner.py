"""The executor `vllm` against the transformers runner: the same vectors, states and scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from cfg_core.errors import CompatibilityError, RequestError
from cfg_core.prefill_only import Engine
from tests.encoders import tiny_checkpoints as tiny

# vLLM's CPU attention needs a head size of 32.
TEXTS = tiny.random_texts(20, seed=2)
VLLM = {
    "workflow": {"executor": "vllm"},
    "dtype": "float32",
    "vllm": {"enforce_eager": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 26},
}


@pytest.mark.slow
def test_a_retriever(tmp_path):
    torch.manual_seed(4)
    path = tiny.save(
        tmp_path,
        transformers.AutoModel.from_config(
            tiny.config_of("qwen3", num_attention_heads=2, num_key_value_heads=1, head_dim=32)
        ),
    )
    tiny.sentence_transformers_files(path, "lasttoken")
    with Engine.load(path, dtype="float32") as ours:
        expected = ours.embed(TEXTS)
    with Engine.load(path, **VLLM) as engine:
        assert engine.info.dimension == 64
        np.testing.assert_allclose(engine.embed(TEXTS), expected, atol=2e-5)
        with pytest.raises(RequestError, match="does not compute token_embed: it computes embed"):
            engine.embed_tokens(TEXTS[:1])


def test_models_that_vllm_computes_differently_are_refused(tmp_path):
    config = tiny.config_of("bert", num_labels=1)
    path = tiny.save(tmp_path, transformers.AutoModelForSequenceClassification.from_config(config))
    with pytest.raises(
        CompatibilityError, match="does not compute token types of pairs: use the executor thread"
    ):
        Engine.load(path, **VLLM)


@pytest.mark.slow
def test_a_classifier(tmp_path):
    torch.manual_seed(4)
    config = tiny.config_of("xlm-roberta", num_labels=3, num_attention_heads=2)
    path = tiny.save(tmp_path, transformers.AutoModelForSequenceClassification.from_config(config))
    with Engine.load(path, dtype="float32") as ours:
        expected = ours.classify(TEXTS)
    with Engine.load(path, **VLLM) as engine:
        np.testing.assert_allclose(engine.classify(TEXTS), expected, atol=2e-5)
