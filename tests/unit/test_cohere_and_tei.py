"""The bodies and answers of Cohere's and TEI's clients, and numbers of fewer bits."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import RequestError
from cfg_core.prefill_only.types import RequestOptions
from cfg_core.prefill_only.vector_formats import NUMBERS, bytes_of, converted
from deployments.requests.encode.capabilities import meant_at_root
from tests.unit.test_pooling_protocol import (
    ASKED,
    CLASSIFIER,
    EMBEDDER,
    RERANKER,
    RETRIEVER,
    call_of,
    info_of,
    job_of,
    outputs_of,
    vector,
)

GEMMA = info_of(
    "embed",
    dimension=8,
    prompts={"query": "q: ", "document": "d: ", "Clustering": "c: ", "STS": "s: "},
)


# --- numbers --------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-4, 4, width=32), min_size=16, max_size=16),
    st.sampled_from(["int8", "uint8", "binary", "ubinary"]),
)
def test_scales_do_not_depend_on_the_vector(components, number):
    """So each vector is converted as among others, and uint8 is int8 moved by 128."""
    one = vector(*components)
    both = converted(np.stack([one, one * 3]), number)
    np.testing.assert_array_equal(both[0], converted(one, number))
    pairs = {"uint8": "int8", "ubinary": "binary"}
    if number in pairs:
        signed = converted(one, pairs[number])
        np.testing.assert_array_equal(converted(one, number), signed.astype(int) + 128)


def test_levels():
    reach = vector(-2, -1, -0.5, 0, 0.5, 1, 3)
    assert converted(reach, "int8", 1.0).tolist() == [-127, -127, -64, 0, 64, 127, 127]
    assert converted(reach, "uint8", 1.0).tolist() == [1, 1, 64, 128, 192, 255, 255]
    usual = converted(vector(6 / 2, 3 / 2, 0, 0), "int8")  # 6 / sqrt(4) is the largest
    assert usual.tolist() == [127, 64, 0, 0]


def test_bits_are_those_of_sentence_transformers():
    from benchmarks.oracle import oracle_packages

    with oracle_packages():
        from sentence_transformers.util.quantization import quantize_embeddings
    vectors = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    for number in ("binary", "ubinary"):
        expected = quantize_embeddings(vectors, number)
        found = converted(vectors, number)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", NUMBERS)
def test_sizes(number):
    assert converted(np.ones(16, np.float32), number).nbytes == 16 * bytes_of(number)


def test_int8_keeps_the_order_of_products():
    """Of random unit vectors: products differ by less than a hundredth."""
    vectors = np.random.default_rng(2).normal(size=(50, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    levels = converted(vectors, "int8").astype(np.float32)
    products, found = vectors @ vectors.T, levels @ levels.T
    assert np.abs(found / found[0, 0] - products / products[0, 0]).max() < 0.01


@pytest.mark.parametrize("field", ["encoding_format", "embed_dtype", "output_dtype"])
@pytest.mark.parametrize("endpoint", ["embeddings", "pooling"])
def test_vectors_of_bytes_are_normalised(endpoint, field):
    body = {"input": "x", field: "int8"}
    job = job_of(endpoint, body, RETRIEVER)
    assert job.calls[0].options.normalize is True
    (row,) = job.answer(outputs_of("embed", vector(*[0.25] * 8)))["data"]
    level = round(0.25 * 127 / (6 / 8**0.5))
    assert row["embedding" if endpoint == "embeddings" else "data"] == [level] * 8
    with pytest.raises(RequestError, match="leave normalize out"):
        job_of(endpoint, body | {"normalize": False}, RETRIEVER)


def test_base64_of_bytes():
    job = job_of(
        "embeddings", {"input": "x", "encoding_format": "base64", "embed_dtype": "ubinary"}, GEMMA
    )
    (row,) = job.answer(outputs_of("embed", vector(1, -1, 1, 1, -1, -1, -1, 1)))["data"]
    assert base64.b64decode(row["embedding"]) == bytes([0b10110001])


def test_the_option_of_the_engine_sets_the_scale():
    info = info_of("embed", dimension=8, int8_range=0.5)
    job = job_of("embeddings", {"input": "x", "embed_dtype": "int8"}, info)
    (row,) = job.answer(outputs_of("embed", vector(*[0.25] * 8)))["data"]
    assert row["embedding"] == [round(127 / 2)] * 8


@pytest.mark.parametrize(
    ("fields", "info", "words"),
    [
        ({"embed_dtype": "int4"}, GEMMA, "must be one of float32, float16, int8"),
        ({"embed_dtype": "int8", "encoding_format": "binary"}, GEMMA, "binary and int8"),
        ({"embed_dtype": "binary"}, EMBEDDER, "have 4 components"),
        ({"embed_dtype": "binary", "dimensions": 4}, RETRIEVER, "have 4 components"),
    ],
)
def test_formats_that_are_refused(fields, info, words):
    with pytest.raises(RequestError, match=words):
        job_of("embeddings", {"input": "x", **fields}, info)


def test_an_answer_in_bytes_may_hold_more():
    sizes = [
        job_of("embeddings", {"input": "x", "embed_dtype": number}, GEMMA).answer.bytes_per_value
        for number in ("float32", "int8", "binary")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 4 * sizes[1] > 16 * sizes[2]


# --- input_type -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [
        ("query", "q: "),
        ("search_query", "q: "),
        ("document", "d: "),
        ("passage", "d: "),
        ("SEARCH_DOCUMENT", "d: "),
        ("clustering", "c: "),
        ("classification", ""),
        ("STS", "s: "),
    ],
)
def test_input_type_chooses_the_prompt(input_type, prompt):
    body = {"input": ["x"], "input_type": input_type}
    assert call_of("embeddings", body, GEMMA).options.prompt == prompt
    cohere = {"texts": ["x"], "input_type": input_type}
    assert call_of("cohere_embed", cohere, GEMMA).options.prompt == prompt


def test_an_input_type_that_nothing_knows():
    for endpoint, field in (("embeddings", "input"), ("cohere_embed", "texts")):
        with pytest.raises(RequestError, match=r"one of query, document, .*STS") as error:
            job_of(endpoint, {field: ["x"], "input_type": "image"}, GEMMA)
        assert error.value.param == "input_type"
        with pytest.raises(RequestError, match="input_type"):
            job_of(endpoint, {field: ["x"], "input_type": 3}, GEMMA)
    with pytest.raises(RequestError, match="both given"):
        job_of("embeddings", {"input": "x", "input_type": "query", "prompt": "p"}, GEMMA)
    with pytest.raises(RequestError, match="single texts only"):
        job_of("embeddings", {"input": [1, 2], "input_type": "query"}, GEMMA)


# --- Cohere ---------------------------------------------------------------------------------------


def test_cohere_embed():
    body = {
        "model": "m",
        "texts": ["a", "b"],
        "input_type": "search_document",
        "embedding_types": ["float", "ubinary", "base64"],
        "output_dimension": 8,
    }
    job = job_of("cohere_embed", body, RETRIEVER)
    assert job.calls[0].options == RequestOptions(
        prompt="passage: ", normalize=True, truncate_to=16
    )
    values = vector(1, -1, 1, 1, -1, -1, -1, 1)
    answer = job.answer(outputs_of("embed", values, -values))
    encoded = [base64.b64encode((sign * values).tobytes()).decode() for sign in (1, -1)]
    assert answer["embeddings"] == {
        "float": [values.tolist(), (-values).tolist()],
        "ubinary": [[0b10110001], [0b01001110]],
        "base64": encoded,
    }
    assert answer["texts"] == ["a", "b"]
    assert answer["meta"]["billed_units"] == {"input_tokens": 6}
    assert answer["response_type"] == "embeddings_by_type"


def test_cohere_inputs_of_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = call_of("cohere_embed", {"inputs": [{"content": parts}]})
    assert (call.inputs, call.field) == (["a\nb"], "inputs")


@pytest.mark.parametrize(
    ("fields", "to", "side"),
    [
        ({}, 16, "right"),
        ({"truncate": "END"}, 16, "right"),
        ({"truncate": "START"}, 16, "left"),
        ({"truncate": "NONE"}, None, "right"),
        ({"max_tokens": 5}, 5, "right"),
        ({"max_tokens": 500}, 16, "right"),
    ],
)
def test_cohere_truncation(fields, to, side):
    options = call_of("cohere_embed", {"texts": ["x"], **fields}).options
    assert (options.truncate_to, options.truncation_side) == (to, side)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"texts": None}, "texts", "send a list of texts"),
        ({"texts": "x"}, "texts", "send a list of texts"),
        ({"texts": []}, "texts", "texts is empty"),
        ({"inputs": [{"content": []}]}, "texts", "both given"),
        ({"texts": None, "images": ["data:"]}, "images", "reads no images"),
        ({"texts": None, "inputs": [{"content": []}]}, "inputs", "must be"),
        (
            {"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]},
            "inputs",
            "no text",
        ),
        ({"embedding_types": ["float", "int4"]}, "embedding_types", "some of float, base64"),
        ({"embedding_types": []}, "embedding_types", "must be a list"),
        ({"embedding_types": ["binary"]}, "embedding_types", "have 4 components"),
        ({"output_dimension": 2}, "output_dimension", "leave output_dimension out"),
        ({"truncate": "MIDDLE"}, "truncate", "NONE, START or END"),
        ({"truncate": True}, "truncate", "NONE, START or END"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_cohere_refusals(fields, param, words):
    with pytest.raises(RequestError, match=words) as error:
        job_of("cohere_embed", {"texts": ["x"], **fields})
    assert error.value.param == param


# --- TEI ------------------------------------------------------------------------------------------


def test_tei_embed():
    job = job_of("embed", {"inputs": ["a", "b"], "truncate": True, "dimensions": 4}, RETRIEVER)
    assert job.calls[0].options == RequestOptions(
        prompt="d: ", normalize=True, truncate_to=16, dimensions=4
    )
    assert job.answer(outputs_of("embed", vector(1, 0), vector(0, 1))) == [[1, 0], [0, 1]]
    raw = call_of("embed", {"inputs": "a", "normalize": False})
    assert (raw.options.normalize, raw.field) == (False, "inputs")
    assert call_of("embed", {"inputs": [[1, 2], [3]]}).inputs == [[1, 2], [3]]


def test_tei_embed_all():
    job = job_of("embed_all", {"inputs": "a"})
    assert job.calls[0].options == RequestOptions(tasks=("token_embed",), normalize=False)
    states = np.ones((2, 3), np.float32)
    assert job.answer(outputs_of("token_embed", states)) == [[[1.0] * 3] * 2]


@pytest.mark.parametrize(
    ("inputs", "read", "is_batch"),
    [
        ("a", ["a"], False),
        (["a"], ["a"], False),
        (["a", "b"], [("a", "b")], False),
        ([["a"], ["b"]], ["a", "b"], True),
        ([["a", "b"], ["c", "d"]], [("a", "b"), ("c", "d")], True),
    ],
)
def test_tei_predict(inputs, read, is_batch):
    job = job_of("predict", {"inputs": inputs, "raw_scores": True}, CLASSIFIER)
    assert job.calls[0].inputs == read
    assert job.calls[0].options.raw_scores
    scores = outputs_of("classify", *[vector(0.25, 0.75)] * len(read))
    row = [{"score": 0.75, "label": "yes"}, {"score": 0.25, "label": "no"}]
    assert job.answer(scores) == ([row] * len(read) if is_batch else row)


@pytest.mark.parametrize(
    "inputs", [None, 3, "", [], ["a", ""], ["a", "b", "c"], [["a"], "b"], [["a"], ["b", "c"]], [[]]]
)
def test_tei_predict_refusals(inputs):
    with pytest.raises(RequestError) as error:
        job_of("predict", {"inputs": inputs}, CLASSIFIER)
    assert error.value.param == "inputs"


def test_tei_predict_takes_an_instruction():
    body = {"inputs": ["q", "d"], "instruction": "Find."}
    assert call_of("predict", body, ASKED).options.prompt == "Find."
    with pytest.raises(RequestError, match="leave instruction out"):
        job_of("predict", body, RERANKER)


def test_tei_similarity():
    inputs = {"source_sentence": "a", "sentences": ["b", "c"]}
    parameters = {"truncate": True, "prompt_name": "query"}
    job = job_of("similarity", {"inputs": inputs, "parameters": parameters}, RETRIEVER)
    assert [call.inputs for call in job.calls] == [["a"], ["b", "c"]]
    assert {call.options for call in job.calls} == {
        RequestOptions(prompt="query: ", truncate_to=16)
    }
    answer = job.answer(outputs_of("embed", vector(1, 0), vector(2, 0), vector(0, 3)))
    assert answer == pytest.approx([1, 0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": "a"}, "inputs"),
        ({"inputs": {"source_sentence": "a"}}, "sentences"),
        ({"inputs": {"sentences": ["a"]}}, "source_sentence"),
        ({"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": 3}, "parameters"),
    ],
)
def test_tei_similarity_refusals(body, param):
    with pytest.raises(RequestError) as error:
        job_of("similarity", body, RETRIEVER)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("body", "embeds", "endpoint"),
    [
        ({"inputs": "x"}, True, "embed"),
        ({"inputs": ["x", "y"], "truncate": True}, True, "embed"),
        ({"inputs": "x"}, False, "predict"),
        ({"inputs": {"source_sentence": "x", "sentences": ["y"]}}, True, "similarity"),
        ({"query": "x", "texts": ["y"]}, True, "rerank"),
        ({"query": "x", "texts": ["y"]}, False, "rerank"),
        ({}, True, "embed"),
    ],
)
def test_what_a_body_without_a_path_means(body, embeds, endpoint):
    assert meant_at_root(body, embeds) == endpoint
