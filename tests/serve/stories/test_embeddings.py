"""Encoders over HTTP beside the generator: the shipped MiniLM."""

from __future__ import annotations

import base64
import concurrent.futures
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest

from cfg_core.prefill_only import Engine, RequestOptions
from cfg_core.prefill_only.types import FloatArray, Input
from deployments.config.model_paths import resolve_model
from deployments.requests.encode.capabilities import PATHS as ENCODE_PATHS
from deployments.requests.encode.capabilities import EncodeEndpoint
from tests.serve.minilm import CLOSE, MINILM, NAME, PASSAGES, QUERY, TEXTS, post
from tests.support.bad_bodies import ENCODING, INPUTS, RERANKS, SCORES, Bad
from tools.serving.process import Json


@pytest.fixture(scope="module")
def minilm() -> Iterator[Engine]:
    """Yield the same engine in this process."""
    with Engine.load(resolve_model(MINILM), dtype="float32") as engine:
        yield engine


def embed(engine: Engine, inputs: Sequence[Input], **options: Any) -> FloatArray:
    outputs = engine.run(inputs, RequestOptions(**options))
    return np.stack([output.array("embed") for output in outputs])


def vectors_of(answer: Json) -> FloatArray:
    return np.array([row["embedding"] for row in answer["data"]], dtype=np.float32)


# --- embeddings beside the generator --------------------------------------------------------------


def test_the_openai_client_gets_the_engines_vectors(client: openai.OpenAI, minilm: Engine) -> None:
    """By default, the client asks for base64."""
    answer = client.embeddings.create(model=NAME, input=TEXTS)
    assert [row.index for row in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(
        [row.embedding for row in answer.data], embed(minilm, TEXTS), **CLOSE
    )
    plain = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    np.testing.assert_allclose([row.embedding for row in plain.data], embed(minilm, TEXTS), **CLOSE)


def test_texts_and_token_ids_are_the_same(http: httpx.Client, minilm: Engine) -> None:
    tokens = [post(http, "/tokenize", model=NAME, prompt=text)["tokens"] for text in TEXTS]
    answer = post(http, "/v1/embeddings", model=NAME, input=tokens)
    np.testing.assert_allclose(vectors_of(answer), embed(minilm, TEXTS), **CLOSE)
    num_tokens = sum(map(len, tokens))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    one = post(http, "/v1/embeddings", model=NAME, input=tokens[0])
    np.testing.assert_allclose(vectors_of(one), embed(minilm, TEXTS[:1]), **CLOSE)


def test_base64_is_little_endian_float32(http: httpx.Client, minilm: Engine) -> None:
    answer = post(http, "/v1/embeddings", model=NAME, input="x", encoding_format="base64")
    raw = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), embed(minilm, ["x"])[0], **CLOSE)


def test_options(http: httpx.Client, minilm: Engine) -> None:
    text = "word " * 600
    cut = post(http, "/v1/embeddings", model=NAME, input=text, truncate_prompt_tokens=10)
    assert cut["usage"]["prompt_tokens"] == 10
    np.testing.assert_allclose(vectors_of(cut), embed(minilm, [text], truncate_to=10), **CLOSE)
    for fields in ({"truncate_prompt_tokens": -1}, {"truncate": True}, {"truncate": "END"}):
        whole = post(http, "/v1/embeddings", model=NAME, input=text, **fields)
        assert whole["usage"]["prompt_tokens"] == minilm.info.max_input_tokens
    prompted = post(http, "/v1/embeddings", model=NAME, input="cats", prompt="query: ")
    np.testing.assert_allclose(vectors_of(prompted), embed(minilm, ["query: cats"]), **CLOSE)
    raw = post(http, "/v1/embeddings", model=NAME, input="cats", use_activation=False)
    np.testing.assert_allclose(vectors_of(raw), embed(minilm, ["cats"], normalize=False), **CLOSE)


def test_the_only_encoder_needs_no_name(http: httpx.Client) -> None:
    assert post(http, "/v1/embeddings", input="x")["model"] == NAME
    assert post(http, "/rerank", query="x", texts=["y"])[0]["index"] == 0


def test_rerank_and_score_by_cosine(http: httpx.Client, minilm: Engine) -> None:
    vectors = embed(minilm, [QUERY, *PASSAGES])
    expected = vectors[1:] @ vectors[0]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = post(
            http, path, model=NAME, query=QUERY, documents=PASSAGES, top_n=2, return_documents=True
        )
        assert [result["index"] for result in answer["results"]] == list(np.argsort(-expected)[:2])
        assert answer["results"][0]["document"] == {"text": "The cat sat on the mat."}
        assert answer["results"][0]["relevance_score"] == pytest.approx(
            float(expected.max()), abs=1e-5
        )
    for path in ("/score", "/v1/score"):
        scores = post(http, path, model=NAME, text_1=QUERY, text_2=PASSAGES)
        np.testing.assert_allclose([row["score"] for row in scores["data"]], expected, **CLOSE)


def test_pooling(http: httpx.Client, minilm: Engine) -> None:
    tokens = post(http, "/pooling", model=NAME, input="The cat sat.", task="token_embed")["data"][
        0
    ]["data"]
    (output,) = minilm.run(["The cat sat."], RequestOptions(tasks=("token_embed",)))
    expected = output.array("token_embed")
    np.testing.assert_allclose(tokens, expected, **CLOSE)
    np.testing.assert_allclose(
        post(http, "/pooling", model=NAME, input="x")["data"][0]["data"],
        embed(minilm, ["x"])[0],
        **CLOSE,
    )


def test_tokens_of_an_encoder(http: httpx.Client) -> None:
    answer = post(http, "/tokenize", model=NAME, prompt="The cat sat.", return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] > 0
    assert "the cat sat" in post(http, "/detokenize", model=NAME, tokens=answer["tokens"])["prompt"]


def test_models_and_ready(http: httpx.Client, model: str) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == [model, NAME]
    assert cards[NAME]["dtype"] == "float32"
    assert cards[NAME]["endpoints"] == [
        *("/v1/embeddings", "/v1/rerank", "/score", "/pooling"),
        *("/v2/embed", "/embed", "/embed_all", "/similarity"),
    ]
    ready = http.get("/ready").json()
    assert ready["engine"]["total_blocks"] > 0
    assert ready["encoders"][NAME].keys() >= {
        "queued_sequences",
        "queued_tokens",
        "batches_in_flight",
    }


def test_time_runs_out(http: httpx.Client) -> None:
    """The timeout is a field or a header. A request after that is answered."""
    body = {"model": NAME, "input": TEXTS * 40}
    for timeout in (
        {"json": body | {"timeout": 0.01}},
        {"json": body, "headers": {"X-Request-Timeout": "0.01"}},
    ):
        late = http.post("/v1/embeddings", **timeout)
        assert late.status_code == 504, late.text
        assert late.json()["error"]["type"] == "timeout_error"
    refused = http.post("/v1/embeddings", json=body | {"timeout": "soon"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout")
    assert len(post(http, "/v1/embeddings", **body, timeout=60)["data"]) == len(body["input"])


# --- bad input ------------------------------------------------------------------------------------

REFUSED = [
    # path, body besides the model, status, parameter at fault, words of the message
    ("/v1/embeddings", {"input": [[10**6]]}, 400, "input", "token id 1000000"),
    ("/v1/embeddings", {"input": [-1]}, 400, "input", "token id -1"),
    ("/v1/embeddings", {"input": ["x", "word " * 600]}, 400, "input", "input 1 has 602 tokens"),
    (
        "/v1/embeddings",
        {"input": "x", "model": "nope"},
        404,
        "model",
        f"The model `nope` does not exist: use stories, {NAME}.",
    ),
    ("/v1/embeddings", {"input": "x", "model": 3}, 400, "model", "model is a number"),
    (
        "/v1/embeddings",
        {"input": "x", "model": "stories"},
        400,
        "model",
        f"for /v1/embeddings use {NAME}",
    ),
    ("/classify", {"input": "x"}, 400, "model", "cannot serve /classify: use /v1/embeddings"),
    ("/classify", {"input": "x", "model": None}, 400, "model", "no model here serves /classify"),
    ("/embed_sparse", {"inputs": "x"}, 400, "model", "cannot serve /embed_sparse"),
    (
        "/v1/rerank",
        {"query": "q", "documents": ["a", "word " * 600]},
        400,
        "documents",
        "documents: input 1 has 602",
    ),
    ("/pooling", {"input": "x", "task": "classify"}, 400, "task", "use embed, token_embed"),
    ("/tokenize", {}, 400, "prompt", "prompt is missing"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens", "token id 1000000"),
    (
        "/v1/completions",
        {"prompt": "x"},
        400,
        "model",
        f"{NAME} is an encoder: use it with /v1/embeddings",
    ),
    ("/v1/chat/completions", {"messages": []}, 400, "model", "generate with stories"),
    ("/v1/completions", {"prompt": "x", "model": "nope"}, 404, "model", f"use stories, {NAME}"),
]
"""What is refused by reading it is in tests/support/bad_bodies.py."""


@pytest.mark.parametrize("bad", [*INPUTS, *ENCODING, *RERANKS, *SCORES], ids=str)
def test_fields_of_encoders(http: httpx.Client, bad: Bad) -> None:
    body = {"model": NAME, **bad.fields}
    answer = http.post(ENCODE_PATHS[cast(EncodeEndpoint, bad.endpoint)], json=body)
    assert answer.status_code == 400, answer.text
    assert bad.words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == bad.param


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_refusals(
    http: httpx.Client, path: str, body: Json, status: int, param: str, words: str
) -> None:
    answer = http.post(path, json={"model": NAME, **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.embeddings.create(model=NAME, input="")
    with pytest.raises(openai.NotFoundError, match="The model `nope` does not exist"):
        client.embeddings.create(model="nope", input="x")


# --- many at once ---------------------------------------------------------------------------------


def test_neighbours_do_not_change_a_vector(http: httpx.Client, minilm: Engine) -> None:
    rng = random.Random(6)
    texts = [
        " ".join(rng.choices(["cat", "dog", "sea", "sun"], k=rng.randint(1, 150)))
        for _ in range(96)
    ]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(lambda text: post(http, "/v1/embeddings", model=NAME, input=text), texts)
        )
    np.testing.assert_allclose(
        np.concatenate([vectors_of(a) for a in answers]), embed(minilm, texts), **CLOSE
    )
