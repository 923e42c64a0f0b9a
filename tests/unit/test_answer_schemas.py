"""Answers of every kind that encoders give have the form of their schemas."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from cfg_core.prefill_only.types import Output, SparseVector
from deployments.ingress.openapi.answer_schemas import ENCODED
from deployments.requests.encode import answer_formats, cohere
from deployments.requests.encode.answer_formats import FLOATS, NumberFormat
from deployments.requests.encode.scores import Compared

OUTPUTS = [
    Output(
        values={
            "embed": np.array([1.0, 2.0], np.float32),
            "token_embed": np.ones((2, 2), np.float32),
            "classify": np.array([0.2, 0.8], np.float32),
            "sparse": SparseVector(np.array([3]), np.array([0.5], np.float32)),
        },
        num_tokens=3,
    )
    for _ in range(3)
]
TEXTS = ("a", "b")
ANSWERS = [
    ("embeddings", answer_formats.embeddings("m", FLOATS)),
    ("embeddings", answer_formats.embeddings("m", NumberFormat("int8"))),
    ("embeddings", answer_formats.embeddings("m", NumberFormat(as_base64=True))),
    ("pooling", answer_formats.pooling("m", "embed", FLOATS)),
    ("pooling", answer_formats.pooling("m", "token_embed", FLOATS)),
    ("pooling", answer_formats.pooling("m", "sparse", FLOATS)),
    ("pooling", answer_formats.pooling("m", "classify", NumberFormat(as_base64=True))),
    ("classify", answer_formats.classify("m", ("no", "yes"))),
    ("embed_sparse", answer_formats.bare("sparse")),
    ("embed", answer_formats.bare("embed")),
    ("embed_all", answer_formats.bare("token_embed")),
    ("cohere_embed", cohere.answer(("float", "base64", "uint8"), TEXTS, None)),
    ("predict", answer_formats.predict(("no", "yes"), False)),
    ("predict", answer_formats.predict(("no", "yes"), True)),
    ("similarity", answer_formats.similarity()),
    ("score", answer_formats.score("m", Compared(1))),
    ("rerank", answer_formats.rerank("m", Compared(1), top_n=1)),
    ("rerank", answer_formats.rerank("m", Compared(1), documents=TEXTS)),
    ("rerank", answer_formats.rerank_as_tei(Compared(1))),
    ("rerank", answer_formats.rerank_as_tei(Compared(1, "sum"), TEXTS)),
]


def mistakes(schema: Any, value: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jsonschema import Draft202012Validator

        return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize(("endpoint", "answer"), ANSWERS)
def test_answers_have_the_form_of_their_schemas(endpoint: Any, answer: Any) -> None:
    value = pickle.loads(pickle.dumps(answer))(OUTPUTS)  # a replica gets it
    assert mistakes(ENCODED[endpoint], value) == []
    changed = [*value, "more"] if isinstance(value, list) else {**value, "more": 1}
    assert mistakes(ENCODED[endpoint], changed)


def test_every_endpoint_is_tried() -> None:
    assert {endpoint for endpoint, _ in ANSWERS} == set(ENCODED)
