"""The encoders' HTTP contract without a server: bodies, jobs, answers and every refusal."""

import base64
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import Output, RequestOptions, SparseVector
from deployments.requests.encode.capabilities import PATHS, can_serve, paths_of
from deployments.requests.encode.field_checks import MAX_ITEMS, read_inputs
from deployments.requests.encode.jobs import check_job, in_terms_of
from deployments.requests.encode.readers import read_job
from deployments.requests.encode.tokens import read_detokenize, read_tokenize
from tests.support.bad_bodies import ENCODING, INPUTS, RERANKS, SCORES


def info_of(*tasks, **fields):
    usual = {"dimension": None, "max_input_tokens": 16, "vocab_size": 100, "dtype": "float32"}
    return ModelInfo(tasks=tasks, **{**usual, **fields})


EMBEDDER = info_of("embed", "token_embed", dimension=4)
RETRIEVER = info_of(
    "embed",
    dimension=8,
    prompts={"query": "query: ", "passage": "passage: "},
    default_prompt="d: ",
    matryoshka=True,
)
RERANKER = info_of("classify", labels=("LABEL_0",))
ASKED = info_of("classify", labels=("yes",), takes_instruction=True)
CLASSIFIER = info_of("classify", labels=("no", "yes"))
SPARSE = info_of("sparse")
BGE_M3 = info_of("embed", "sparse", "token_embed", dimension=4, max_sim="mean")
COLBERT = info_of(
    "token_embed",
    max_sim="sum",
    prompts={"query": "[Q] ", "document": "[D] "},
    default_prompt="[D] ",
)
MODELS = [EMBEDDER, RETRIEVER, RERANKER, ASKED, CLASSIFIER, SPARSE, BGE_M3, COLBERT]


def job_of(endpoint, body, info=EMBEDDER):
    return read_job(endpoint, body, "m", info)


def call_of(endpoint, body, info=EMBEDDER):
    (call,) = job_of(endpoint, body, info).calls
    return call


def outputs_of(task, *values, num_tokens=3):
    return [Output({task: value}, num_tokens) for value in values]


def vector(*numbers):
    return np.array(numbers, dtype=np.float32)


OF_VECTORS = ["/v1/embeddings", "/v1/rerank", "/score", "/pooling"]
COHERE_AND_TEI = ["/v2/embed", "/embed"]


# --- what a model can do --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "paths"),
    [
        (EMBEDDER, [*OF_VECTORS, *COHERE_AND_TEI, "/embed_all", "/similarity"]),
        (RETRIEVER, [*OF_VECTORS, *COHERE_AND_TEI, "/similarity"]),
        (RERANKER, ["/v1/rerank", "/score", "/pooling", "/classify", "/predict"]),
        (CLASSIFIER, ["/pooling", "/classify", "/predict"]),
        (SPARSE, ["/pooling", "/embed_sparse"]),
        (COLBERT, ["/v1/rerank", "/score", "/pooling", "/embed_all"]),
        (
            BGE_M3,
            [*OF_VECTORS, "/embed_sparse", *COHERE_AND_TEI, "/embed_all", "/similarity"],
        ),
    ],
)
def test_endpoints_of_a_model(info, paths):
    assert paths_of(info) == paths


@pytest.mark.parametrize(
    ("endpoint", "info", "words"),
    [
        (
            "rerank",
            CLASSIFIER,
            "m computes 2 labels, so it cannot serve /v1/rerank: use /pooling, /classify,"
            " /predict.",
        ),
        (
            "score",
            SPARSE,
            "m computes sparse, so it cannot serve /score: use /pooling, /embed_sparse.",
        ),
        (
            "embeddings",
            RERANKER,
            "cannot serve /v1/embeddings: use /v1/rerank, /score, /pooling, /classify, /predict.",
        ),
        ("embed_sparse", EMBEDDER, "cannot serve /embed_sparse"),
    ],
)
def test_models_that_cannot_serve_an_endpoint(endpoint, info, words):
    with pytest.raises(RequestError) as error:
        job_of(endpoint, {"input": "x", "query": "x", "documents": ["x"]}, info)
    assert words in str(error.value)
    assert error.value.param == "model"


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["x"] * MAX_ITEMS, ["x"] * MAX_ITEMS),
        (
            [1] * (MAX_ITEMS + 1),
            [[1] * (MAX_ITEMS + 1)],
        ),  # one input; the engine says that it is too long
    ],
    ids=lambda value: repr(value)[:30],
)
def test_inputs(value, inputs):
    assert read_inputs(value) == inputs


def test_pairs():
    assert read_inputs([["a", "b"], ["c", "d"]], pairs=True) == [("a", "b"), ("c", "d")]
    assert read_inputs([[1, 2]], pairs=True) == [[1, 2]]


@pytest.mark.parametrize("value", [[["a", ""]], [["a", "b", "c"]], [["a", 1]], [["a", "b"], "c"]])
def test_bad_pairs(value):
    with pytest.raises(RequestError):
        read_inputs(value, pairs=True)


# --- options --------------------------------------------------------------------------------------


def test_the_defaults_are_the_models():
    assert (
        call_of("embeddings", {"input": "x", "user": "u", "some_field": 1}).options
        == RequestOptions()
    )
    assert call_of("embeddings", {"input": "x"}, RETRIEVER).options == RequestOptions(prompt="d: ")


@pytest.mark.parametrize(
    ("fields", "to", "side"),
    [
        ({}, None, "right"),
        ({"truncate_prompt_tokens": 5}, 5, "right"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, 16, "left"),
        ({"truncate": True}, 16, "right"),
        ({"truncate": True, "truncation_direction": "Left"}, 16, "left"),
        ({"truncate": False}, None, "right"),
        ({"truncate": "NONE"}, None, "right"),
        ({"truncate": "START"}, 16, "left"),
        ({"truncate": "END"}, 16, "right"),
        ({"truncate": "end"}, 16, "right"),
    ],
)
def test_truncation(fields, to, side):
    options = call_of("embeddings", {"input": "x", **fields}).options
    assert (options.truncate_to, options.truncation_side) == (to, side)


def test_prompts():
    body = {"input": ["x"]}
    assert (
        call_of("embeddings", body | {"prompt_name": "query"}, RETRIEVER).options.prompt
        == "query: "
    )
    assert call_of("embeddings", body | {"prompt": "p: "}, RETRIEVER).options.prompt == "p: "
    assert call_of("embeddings", body | {"prompt": ""}, RETRIEVER).options.prompt == ""


def test_dimensions():
    assert call_of("embeddings", {"input": "x", "dimensions": 3}, RETRIEVER).options.dimensions == 3
    assert (
        call_of("embeddings", {"input": "x", "dimensions": 4}, EMBEDDER).options.dimensions is None
    )


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
@pytest.mark.parametrize("value", [True, False, None])
def test_normalisation(name, value):
    assert call_of("embeddings", {"input": "x", name: value}).options.normalize is value


@pytest.mark.parametrize("bad", [*INPUTS, *ENCODING, *RERANKS, *SCORES], ids=str)
def test_refusals(bad):
    with pytest.raises(RequestError) as error:
        job_of(bad.endpoint, bad.fields, RERANKER if bad.endpoint == "rerank" else EMBEDDER)
    assert bad.words in str(error.value)
    assert error.value.param == bad.param


def test_null_is_not_given():
    body = {
        "input": "x",
        "guidance_scale": None,
        "messages": None,
        "dimensions": None,
        "encoding_format": None,
    }
    assert call_of("embeddings", body).options == RequestOptions()


def test_an_unknown_prompt_is_answered_with_the_known_ones():
    with pytest.raises(RequestError, match="it has query, passage"):
        job_of("embeddings", {"input": "x", "prompt_name": "document"}, RETRIEVER)
    with pytest.raises(RequestError, match="this model has 8"):
        job_of("embeddings", {"input": "x", "dimensions": 9}, RETRIEVER)


# --- embeddings and pooling -----------------------------------------------------------------------


def test_embeddings_answer():
    answer = job_of("embeddings", {"input": ["a", "b"]}).answer(
        outputs_of("embed", vector(1, 0.5), vector(0, -2))
    )
    assert answer["object"] == "list"
    assert answer["model"] == "m"
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert answer["data"] == [
        {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
        {"object": "embedding", "index": 1, "embedding": [0.0, -2.0]},
    ]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_base64_is_little_endian_float32(numbers):
    answer = job_of("embeddings", {"input": "a", "encoding_format": "base64"}).answer(
        outputs_of("embed", vector(*numbers))
    )
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, dtype="<f4"), vector(*numbers))


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50)
)
def test_floats_survive_json(numbers):
    answer = json.loads(
        json.dumps(
            job_of("embeddings", {"input": "a"}).answer(outputs_of("embed", vector(*numbers)))
        )
    )
    assert np.array_equal(
        np.array(answer["data"][0]["embedding"], dtype=np.float32), vector(*numbers)
    )


def test_pooling():
    assert call_of("pooling", {"input": "x"}).options.tasks == ("embed",)
    assert call_of("pooling", {"input": "x"}, RERANKER).options.tasks == ("classify",)
    job = job_of("pooling", {"input": "x", "task": "token_embed"})
    answer = job.answer(outputs_of("token_embed", np.ones((2, 3), dtype=np.float32)))
    assert answer["data"] == [{"object": "pooling", "index": 0, "data": [[1.0] * 3] * 2}]
    with pytest.raises(
        RequestError, match="this model has no task 'classify': use embed, token_embed"
    ):
        job_of("pooling", {"input": "x", "task": "classify"})
    with pytest.raises(RequestError, match="set encoding_format to float"):
        job_of("pooling", {"input": "x", "encoding_format": "base64"}, SPARSE)


def test_embed_sparse():
    job = job_of("embed_sparse", {"inputs": ["a", "b"], "truncate": True}, BGE_M3)
    assert job.calls[0].options == RequestOptions(tasks=("sparse",), truncate_to=16)
    weights = SparseVector(np.array([3, 9]), vector(0.5, 2))
    empty = SparseVector(np.array([], dtype=np.int64), vector())
    assert job.answer(outputs_of("sparse", weights, empty)) == [
        [{"index": 3, "value": 0.5}, {"index": 9, "value": 2.0}],
        [],
    ]
    with pytest.raises(RequestError, match="inputs is missing"):
        job_of("embed_sparse", {"input": "a"}, BGE_M3)


def test_classify():
    job = job_of("classify", {"input": ["a", "b"]}, CLASSIFIER)
    answer = job.answer(outputs_of("classify", vector(0.25, 0.75), vector(1, 0)))
    assert answer["data"] == [
        {"index": 0, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2},
        {"index": 1, "label": "no", "probs": [1.0, 0.0], "num_classes": 2},
    ]
    assert call_of("classify", {"input": [["a", "b"]]}, CLASSIFIER).inputs == [("a", "b")]
    assert call_of(
        "classify", {"input": [5, 6], "use_activation": False}, CLASSIFIER
    ).options.raw_scores


# --- rerank and score -----------------------------------------------------------------------------


def test_rerank_with_a_cross_encoder():
    body = {
        "query": "q",
        "documents": ["a", {"text": "b", "title": "t"}, "c"],
        "top_n": 2,
        "return_documents": True,
    }
    job = job_of("rerank", body, RERANKER)
    assert job.calls[0].inputs == [("q", "a"), ("q", "b"), ("q", "c")]
    answer = job.answer(outputs_of("classify", vector(0.125), vector(0.5), vector(0.25)))
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.25, "document": {"text": "c"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("rerank", {"query": "q", "documents": ["a"]}),
        ("score", {"text_1": "q", "text_2": "a"}),
        ("classify", {"input": [["q", "a"]]}),
        ("pooling", {"input": [["q", "a"]]}),
    ],
)
def test_an_instruction(endpoint, body):
    asked = body | {"instruction": "Find answers."}
    assert call_of(endpoint, asked, ASKED).options.prompt == "Find answers."
    assert call_of(endpoint, body, ASKED).options.prompt == ""
    with pytest.raises(RequestError, match="instruction is a number"):
        job_of(endpoint, body | {"instruction": 3}, ASKED)


@pytest.mark.parametrize("info", [RERANKER, RETRIEVER])
def test_an_instruction_that_would_be_ignored_is_refused(info):
    body = {"query": "q", "documents": ["a"], "instruction": "Find answers."}
    with pytest.raises(RequestError, match="leave instruction out") as error:
        job_of("rerank", body, info)
    assert error.value.param == "instruction"


def test_an_instruction_counts_for_each_document():
    body = {"query": "q", "documents": ["a"] * 10, "instruction": "x" * 1000}
    job = job_of("rerank", body, ASKED)
    assert job.num_tokens > 10 * 1000 / 4
    with pytest.raises(RequestError, match="one request may have 9000"):
        check_job(job, EngineOptions(max_request_chars=9000))


def test_rerank_with_an_embedding_model_is_the_cosine():
    job = job_of("rerank", {"query": "q", "documents": ["a", "b"]}, RETRIEVER)
    assert [call.options.prompt for call in job.calls] == ["query: ", "passage: "]
    answer = job.answer(outputs_of("embed", vector(2, 0), vector(0, 3), vector(1, 1)))
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["results"][0]["relevance_score"] == pytest.approx(math.sqrt(0.5))
    assert "document" not in answer["results"][0]


def test_rerank_with_late_interaction():
    job = job_of("rerank", {"query": "q", "documents": ["a", "b", "c"]}, COLBERT)
    assert [(c.options.role, c.options.prompt, c.options.tasks) for c in job.calls] == [
        ("query", "[Q] ", ("token_embed",)),
        ("document", "[D] ", ("token_embed",)),
    ]
    rows = [[[1, 0], [0, 1]], [[1, 0]], [[1, 0], [0, 0.5]], np.zeros((0, 2))]
    outputs = outputs_of("token_embed", *(np.array(row, np.float32) for row in rows))
    assert [(row["index"], row["relevance_score"]) for row in job.answer(outputs)["results"]] == [
        (1, 1.5),
        (0, 1.0),
        (2, 0.0),
    ]
    assert job.answer.bytes_per_value > 0, "the vectors that are held are bounded"


def test_either_kind_of_vectors_of_bge_m3():
    body = {"text_1": ["q"], "text_2": ["a"]}
    assert job_of("score", body, BGE_M3).calls[0].options.tasks == ("embed",)
    job = job_of("score", body | {"task": "token_embed"}, BGE_M3)
    assert {call.options.tasks for call in job.calls} == {("token_embed",)}
    rows = ([[1, 0], [0, 1]], [[1, 0]])
    outputs = outputs_of("token_embed", *(np.array(row, np.float32) for row in rows))
    assert job.answer(outputs)["data"][0]["score"] == 0.5, "the mean over the query's vectors"
    for info in (BGE_M3, EMBEDDER):
        with pytest.raises(RequestError, match="task must be one of embed") as error:
            job_of("score", body | {"task": "sparse"}, info)
        assert error.value.param == "task"


@pytest.mark.parametrize("endpoint", ["pooling", "embed_all"])
def test_roles_of_late_interaction(endpoint):
    body = {"input": ["x"], "inputs": ["x"]}
    document = call_of(endpoint, body, COLBERT).options
    assert (document.role, document.prompt) == ("document", "[D] ")
    query = call_of(endpoint, body | {"input_type": "query"}, COLBERT).options
    assert (query.role, query.prompt) == ("query", "[Q] ")
    assert query.normalize is None


def test_rerank_as_tei():
    job = job_of(
        "rerank",
        {"query": "q", "texts": ["a", "b"], "return_text": True, "raw_scores": True},
        RERANKER,
    )
    assert job.calls[0].options.raw_scores
    assert job.answer(outputs_of("classify", vector(-1), vector(3))) == [
        {"index": 1, "score": 3.0, "text": "b"},
        {"index": 0, "score": -1.0, "text": "a"},
    ]
    plain = job_of("rerank", {"query": "q", "texts": ["a"]}, RERANKER)
    assert plain.answer(outputs_of("classify", vector(1))) == [{"index": 0, "score": 1.0}]


def test_equal_scores_keep_the_order_of_the_request():
    job = job_of("rerank", {"query": "q", "texts": ["a", "b", "c"]}, RERANKER)
    assert [row["index"] for row in job.answer(outputs_of("classify", *[vector(1)] * 3))] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("q", "a", [("q", "a")]),
        ("q", ["a", "b"], [("q", "a"), ("q", "b")]),
        (["p", "q"], ["a", "b"], [("p", "a"), ("q", "b")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_score(left, right, pairs, names):
    body = dict(zip(names, (left, right), strict=True))
    job = job_of("score", body, RERANKER)
    assert job.calls[0].inputs == pairs
    answer = job.answer(outputs_of("classify", *(vector(i) for i in range(len(pairs)))))
    assert [(row["index"], row["object"], row["score"]) for row in answer["data"]] == [
        (i, "score", float(i)) for i in range(len(pairs))
    ]
    cosine = job_of("score", body, EMBEDDER)
    vectors = outputs_of("embed", *[vector(1, 1)] * sum(len(call.inputs) for call in cosine.calls))
    assert [row["score"] for row in cosine.answer(vectors)["data"]] == pytest.approx(
        [1.0] * len(pairs)
    )


# --- the rest -------------------------------------------------------------------------------------


def test_tokenize_and_detokenize():
    request = read_tokenize({"prompt": "a", "add_special_tokens": False, "return_token_strs": True})
    assert (request.text, request.add_special_tokens, request.with_strings) == ("a", False, True)
    assert read_tokenize({"prompt": ""}).add_special_tokens
    assert read_detokenize({"tokens": [0, 99]}, EMBEDDER) == [0, 99]
    for body in ({}, {"prompt": 3}, {"messages": []}):
        with pytest.raises(RequestError):
            read_tokenize(body)
    for tokens in (None, "x", [True], [-1], [100], [1.0]):
        with pytest.raises(RequestError):
            read_detokenize({"tokens": tokens}, EMBEDDER)


def test_the_engines_errors_name_the_clients_field():
    call = call_of("rerank", {"query": "q", "documents": ["a"]}, RERANKER)
    error = in_terms_of(
        call, RequestError("input 0 has 20 tokens and this model takes 16.", "input")
    )
    assert error.param == "documents"
    assert str(error) == "documents: input 0 has 20 tokens and this model takes 16."
    other = RequestError("x", "dimensions")
    assert in_terms_of(call, other) is other


def test_jobs_cross_processes():
    job = job_of("rerank", {"query": "q", "documents": ["a"] * 3}, RETRIEVER)
    assert pickle.loads(pickle.dumps(job)) == job
    assert 3 < job.num_tokens < 20
    assert job_of("embeddings", {"input": [[1] * 10, [1] * 5]}).num_tokens == 15


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 200)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)
FIELDS = """input inputs query documents texts text_1 text_2 dimensions encoding_format task
truncate truncate_prompt_tokens truncation_side prompt prompt_name normalize top_n return_documents
raw_scores use_activation instruction embed_dtype input_type
embedding_types messages guidance_scale extra_body user"""
GOOD = {"input": "x", "inputs": "x", "query": "q", "documents": ["d"], "text_1": "a", "text_2": "b"}


def outcome(endpoint, body, info):
    try:
        return job_of(endpoint, body, info)
    except RequestError as error:
        return error


@given(
    st.sampled_from(list(PATHS)),
    st.sampled_from(MODELS),
    st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=4),
)
def test_any_body_is_a_job_or_a_request_error(endpoint, info, fields):
    """Every job has inputs of one kind, and tasks that the model has."""
    job = outcome(endpoint, GOOD | fields, info)
    if isinstance(job, RequestError):
        assert str(job).endswith(".")
        assert job.param
        return
    assert can_serve(info, endpoint)
    assert pickle.loads(pickle.dumps(job)) == job
    for call in job.calls:
        assert 1 <= len(call.inputs) <= MAX_ITEMS
        assert len({type(item) for item in call.inputs}) == 1
        assert all(item for item in call.inputs)
        assert set(call.options.tasks) <= set(info.tasks)
