"""An application of encoders without a generator (conftest.py)."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from cfg_core.prefill_only import Engine, RequestOptions
from cfg_core.prefill_only.types import FloatArray, Input
from cfg_core.prefill_only.vector_formats import converted
from deployments.config.model_paths import resolve_model
from tests.serve.minilm import CLOSE, MINILM, NAME, PASSAGES, QUERY, TEXTS, post
from tools.serving.process import Json, ServeProcess

pytestmark = pytest.mark.slow


def classify(engine: Engine, inputs: Sequence[Input], **options: Any) -> FloatArray:
    outputs = engine.run(inputs, RequestOptions(tasks=("classify",), **options))
    return np.stack([output.array("classify") for output in outputs])


def test_rerank_with_a_cross_encoder(alone: httpx.Client, checkpoints: dict[str, str]) -> None:
    pairs = [(QUERY, passage) for passage in PASSAGES]
    with Engine.load(checkpoints["reranker"], dtype="float32") as engine:
        expected, raw = (classify(engine, pairs, raw_scores=raw)[:, 0] for raw in (False, True))
    answer = post(alone, "/v1/rerank", model="reranker", query=QUERY, documents=PASSAGES)
    assert [result["index"] for result in answer["results"]] == list(np.argsort(-expected))
    np.testing.assert_allclose(
        [r["relevance_score"] for r in answer["results"]], np.sort(expected)[::-1], **CLOSE
    )
    tei = post(alone, "/rerank", model="reranker", query=QUERY, texts=PASSAGES, raw_scores=True)
    np.testing.assert_allclose(
        [row["score"] for row in tei], np.sort(raw)[::-1], rtol=1e-4, atol=1e-4
    )
    scores = post(alone, "/score", model="reranker", text_1=[QUERY] * 3, text_2=PASSAGES)
    np.testing.assert_allclose([row["score"] for row in scores["data"]], expected, **CLOSE)


def test_classify(alone: httpx.Client, checkpoints: dict[str, str]) -> None:
    with Engine.load(checkpoints["classifier"], dtype="float32") as engine:
        expected = classify(engine, TEXTS)
    for path in ("/classify", "/v1/classify"):
        rows = post(alone, path, model="classifier", input=TEXTS)["data"]
        np.testing.assert_allclose([row["probs"] for row in rows], expected, **CLOSE)
        assert [row["label"] for row in rows] == [
            ["sad", "glad", "mad"][i] for i in expected.argmax(1)
        ]
        assert {row["num_classes"] for row in rows} == {3}


def test_cohere_and_tei(alone: httpx.Client, checkpoints: dict[str, str]) -> None:
    with Engine.load(resolve_model(MINILM), dtype="float32") as engine:
        vectors = engine.embed(TEXTS)
        tokens = engine.run(TEXTS, engine.options("token_embed", normalize=False))
    types = ["float", "ubinary", "int8"]
    cohere = post(
        *(alone, "/v2/embed"), texts=TEXTS, input_type="search_query", embedding_types=types
    )["embeddings"]
    np.testing.assert_allclose(cohere["float"], vectors, **CLOSE)
    assert np.mean(np.packbits(vectors > 0, -1) == cohere["ubinary"]) > 0.999
    assert np.abs(converted(vectors, "int8") - np.array(cohere["int8"])).max() <= 1
    np.testing.assert_allclose(post(alone, "/embed", inputs=TEXTS), vectors, **CLOSE)
    for found, output in zip(post(alone, "/embed_all", inputs=TEXTS), tokens, strict=True):
        np.testing.assert_allclose(found, output.array("token_embed"), rtol=0, atol=2e-4)
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    cosines = post(alone, "/similarity", inputs=inputs)
    np.testing.assert_allclose(cosines, vectors[1:] @ vectors[0], **CLOSE)
    with Engine.load(checkpoints["classifier"], dtype="float32") as engine:
        expected = classify(engine, TEXTS)
    batch = post(alone, "/predict", model="classifier", inputs=[[text] for text in TEXTS])
    np.testing.assert_allclose(
        [[row["score"] for row in rows] for rows in batch], np.sort(expected)[:, ::-1], **CLOSE
    )
    single = post(alone, "/predict", model="classifier", inputs=TEXTS[0])
    assert [row["label"] for row in single] == [row["label"] for row in batch[0]]
    np.testing.assert_allclose(
        [row["score"] for row in single], [row["score"] for row in batch[0]], **CLOSE
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a"]}, 400, f"name one of {NAME}, reranker"),
        (
            "/v1/rerank",
            {"query": "q", "documents": ["a"], "model": "classifier"},
            400,
            "classifier computes 3 labels",
        ),
        ("/classify", {"input": "x"}, 400, "name one of reranker, classifier"),
        ("/tokenize", {"prompt": "x"}, 400, "name one of"),
        ("/v1/completions", {"prompt": "x"}, 400, "no model here generates text"),
        (
            "/v1/completions",
            {"prompt": "x", "model": "nope"},
            404,
            f"use {NAME}, reranker, classifier",
        ),
    ],
)
def test_which_model(alone: httpx.Client, path: str, body: Json, status: int, words: str) -> None:
    answer = alone.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


def test_the_encoder_that_alone_can_is_found(alone: httpx.Client) -> None:
    assert post(alone, "/v1/embeddings", input="x")["model"] == NAME


def test_no_generator_is_ready(alone: httpx.Client) -> None:
    ready = alone.get("/ready").json()
    assert ready.keys() == {"status", "encoders"}
    assert list(ready["encoders"]) == [NAME, "reranker", "classifier"]


def test_a_full_queue_is_429(alone: httpx.Client) -> None:
    """Each request fits into the queue, but all together do not."""

    def ask(i: int) -> httpx.Response:
        return alone.post(
            "/v1/embeddings", json={"model": NAME, "input": [f"{i} " + "word " * 200] * 15}
        )

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert "Too many requests are waiting: try again in" in refused.json()["error"]["message"]


def replicas_of(process: ServeProcess, deployment: str) -> list[psutil.Process]:
    found = []
    for child in process.processes():
        with suppress(psutil.Error):
            title = " ".join(child.cmdline())
            if "ServeReplica" in title and f":{deployment}" in title.replace("#", ":"):
                found.append(child)
    return found


def test_a_lost_replica_is_not_noticed(encoders: ServeProcess, alone: httpx.Client) -> None:
    """If one of two replicas is killed while eight clients ask, every answer is 200."""
    deadline = time.monotonic() + 8

    def ask(i: int) -> set[int]:
        statuses: set[int] = set()
        while time.monotonic() < deadline:
            statuses.add(
                alone.post("/v1/embeddings", json={"model": NAME, "input": f"text {i}"}).status_code
            )
        return statuses

    victim, _ = replicas_of(encoders, "Embedder")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, i) for i in range(8)]
        time.sleep(2)
        victim.kill()
        assert set[int]().union(*(future.result() for future in futures)) == {200}
