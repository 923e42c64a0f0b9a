"""An application of encoders without a generator.

It serves MiniLM on two replicas, and a reranker and a classifier with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from deployments.config.model_paths import resolve_model
from tests.serve.minilm import MINILM, NAME
from tools.serving.process import ServeProcess, shipped_config


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make a reranker and a classifier with random weights and MiniLM's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MINILM))
    paths = {}
    for name, labels in (("reranker", ["LABEL_0"]), ("classifier", ["sad", "glad", "mad"])):
        torch.manual_seed(len(labels))
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=256,
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
            initializer_range=0.5,
        )
        paths[name] = str(tmp_path_factory.mktemp(name))
        BertForSequenceClassification(config).save_pretrained(paths[name])
        tokenizer.save_pretrained(paths[name])
    return paths


@pytest.fixture(scope="package")
def encoders(checkpoints: dict[str, str]) -> Iterator[ServeProcess]:
    """Serve encoders without a generator. The embedder has two replicas and a short queue."""
    config = shipped_config()
    application = config["applications"][0]
    embedder = next(d for d in application["deployments"] if d["name"] == "Embedder")
    application["args"] = {
        "num_retries": 5,
        "encoders": [
            {
                "model": MINILM,
                "served_model_name": NAME,
                "engine": {"max_queued_tokens": 4000, "dtype": "float32"},
            },
            {
                "model": checkpoints["reranker"],
                "served_model_name": "reranker",
                "deployment": "Reranker",
                "engine": {"dtype": "float32"},
            },
            {
                "model": checkpoints["classifier"],
                "served_model_name": "classifier",
                "deployment": "Classifier",
                "engine": {"dtype": "float32"},
            },
        ],
    }
    small = {**embedder, "ray_actor_options": {**embedder["ray_actor_options"], "num_cpus": 0.3}}
    application["deployments"] = [
        next(d for d in application["deployments"] if d["name"] == "CfgRouter"),
        {**small, "num_replicas": 2},
        {**small, "name": "Reranker"},
        {**small, "name": "Classifier"},
    ]
    with ServeProcess(config) as process:
        yield process


@pytest.fixture
def alone(encoders: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=encoders.url, timeout=60) as http:
        yield http
