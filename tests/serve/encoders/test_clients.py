"""The clients of OpenAI, Cohere and Hugging Face, against the encoders' routes.

Hugging Face's client is one for text-embeddings-inference (TEI). It sends all requests to the
address that it was given, without a path.
"""

from __future__ import annotations

from collections.abc import Iterator

import cohere
import numpy as np
import pytest
from huggingface_hub import InferenceClient, constants
from openai import OpenAI

from cfg_core.prefill_only import Engine
from cfg_core.prefill_only.types import FloatArray
from cfg_core.prefill_only.vector_formats import converted
from deployments.config.model_paths import resolve_model
from tests.serve.minilm import CLOSE, MINILM, NAME, PASSAGES, QUERY, TEXTS
from tools.serving.process import ServeProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vectors() -> FloatArray:
    """What MiniLM says of TEXTS."""
    with Engine.load(resolve_model(MINILM), dtype="float32") as engine:
        return engine.embed(TEXTS)


def test_openai(encoders: ServeProcess, vectors: FloatArray) -> None:
    """It asks for base64, unless it is told otherwise."""
    with OpenAI(base_url=f"{encoders.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model=NAME, input=TEXTS)
        floats = client.embeddings.create(model=NAME, input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose([row.embedding for row in found.data], vectors, **CLOSE)
    np.testing.assert_allclose(floats.data[0].embedding, vectors[0], **CLOSE)
    assert found.usage.total_tokens > len(TEXTS)


@pytest.fixture
def cohere_client(encoders: ServeProcess) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(api_key="none", base_url=encoders.url) as client:
        yield client


def test_cohere_embeds(cohere_client: cohere.ClientV2, vectors: FloatArray) -> None:
    found = cohere_client.embed(
        model=NAME, texts=TEXTS, input_type="search_query", embedding_types=["float", "int8"]
    ).embeddings
    np.testing.assert_allclose(np.array(found.float_), vectors, **CLOSE)
    assert np.abs(converted(vectors, "int8") - np.array(found.int8)).max() <= 1


def test_cohere_reranks(cohere_client: cohere.ClientV2) -> None:
    found = cohere_client.rerank(model=NAME, query=QUERY, documents=PASSAGES, top_n=2).results
    assert found[0].index == 1
    assert len(found) == 2
    assert found[0].relevance_score > found[1].relevance_score


def test_cohere_tells_errors(cohere_client: cohere.ClientV2) -> None:
    with pytest.raises(cohere.NotFoundError, match="does not exist"):
        cohere_client.embed(model="nope", texts=["x"], input_type="search_query")


@pytest.fixture
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's client refuses to call any server if it must not call the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("_online")
@pytest.mark.parametrize("path", ["", "/embed"])
def test_hugging_face_embeds(encoders: ServeProcess, vectors: FloatArray, path: str) -> None:
    client = InferenceClient(f"{encoders.url}{path}", token="none")
    np.testing.assert_allclose(client.feature_extraction(TEXTS), vectors, **CLOSE)
    cut = client.feature_extraction(
        "word " * 600, normalize=True, truncate=True, truncation_direction="left"
    )
    assert np.linalg.norm(cut) == pytest.approx(1, abs=1e-5)


@pytest.mark.usefixtures("_online")
def test_hugging_face_compares(encoders: ServeProcess, vectors: FloatArray) -> None:
    client = InferenceClient(encoders.url, token="none")
    cosines = client.sentence_similarity(TEXTS[0], TEXTS[1:])
    np.testing.assert_allclose(cosines, vectors[1:] @ vectors[0], **CLOSE)
