"""Answers of encoders: what turns the outputs of an engine into JSON values.

The ingress makes an AnswerFormat, which knows what its request asked for (readers.py). The replica
calls it, and encodes the result as JSON text.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cfg_core.prefill_only.number_formats import BITS, BYTES, Number, bytes_of, converted
from cfg_core.prefill_only.types import Output, SparseVector, Task

JSON_BYTES, BYTE_BYTES, SPARSE_BYTES = 22.0, 5.0, 45.0
"""Estimated bytes of one number in an answer.

The number is decimal text of a float, that of a byte, or an object with index and value.
"""


@dataclass(frozen=True)
class NumberFormat:
    """How the numbers of vectors are sent: their type, and as base64 text or as JSON numbers."""

    number: Number = "float32"
    as_base64: bool = False
    int8_range: float | None = None

    @property
    def bytes_per_value(self) -> float:
        """Estimated bytes in the answer for each component."""
        if self.as_base64:
            return bytes_of(self.number) * 4 / 3
        if self.number in BITS:
            return BYTE_BYTES / 8
        return BYTE_BYTES if self.number in BYTES else JSON_BYTES


FLOATS = NumberFormat()


@dataclass(frozen=True)
class AnswerFormat:
    """Called with the outputs of all calls of a job, in order, it returns the client's JSON value.

    write: does that, called with `args` and with the outputs.
    bytes_per_value: estimated bytes in the answer for each number in the outputs; 0 if the answer
        does not contain these numbers.
    num_chars: characters of the request's texts that the answer sends back.
    """

    write: Callable[..., Any]
    args: tuple[Any, ...] = ()
    bytes_per_value: float = 0.0
    num_chars: int = 0

    def __call__(self, outputs: Sequence[Output]) -> Any:
        return self.write(*self.args, outputs)


def embeddings(model: str, form: NumberFormat) -> AnswerFormat:
    """The answer of /v1/embeddings: OpenAI's list of embeddings."""
    return _vectors(("embd", "embedding", "embedding"), model, "embed", form)


def pooling(model: str, task: Task, form: NumberFormat) -> AnswerFormat:
    """The answer of vLLM's /pooling: whatever the task computes."""
    return _vectors(("pool", "pooling", "data"), model, task, form)


def _vectors(
    names: tuple[str, str, str], model: str, task: Task, form: NumberFormat
) -> AnswerFormat:
    """names: how the answer's id begins, what its rows are, and the key of their numbers."""
    size = SPARSE_BYTES if task == "sparse" else form.bytes_per_value
    return AnswerFormat(_write_vectors, (names, model, task, form), size)


def _write_vectors(
    names: tuple[str, str, str],
    model: str,
    task: Task,
    form: NumberFormat,
    outputs: Sequence[Output],
) -> dict[str, Any]:
    kind, name, key = names
    rows = [
        {"object": name, "index": i, key: numbers(output.values[task], form)}
        for i, output in enumerate(outputs)
    ]
    return _listed(kind, model, rows, outputs)


def classify(model: str, labels: tuple[str, ...]) -> AnswerFormat:
    """The answer of vLLM's /classify: a score for each label, and the label with the highest."""
    return AnswerFormat(_write_labels, (model, labels), JSON_BYTES)


def _write_labels(model: str, labels: tuple[str, ...], outputs: Sequence[Output]) -> dict[str, Any]:
    of_outputs = [np.asarray(output.values["classify"]) for output in outputs]
    rows = [
        {
            "index": i,
            "label": labels[int(scores.argmax())],
            "probs": scores.tolist(),
            "num_classes": len(scores),
        }
        for i, scores in enumerate(of_outputs)
    ]
    return _listed("classify", model, rows, outputs)


def bare(task: Task) -> AnswerFormat:
    """The answer of TEI's /embed, /embed_all and /embed_sparse: a list of values."""
    return AnswerFormat(_write_bare, (task,), SPARSE_BYTES if task == "sparse" else JSON_BYTES)


def _write_bare(task: Task, outputs: Sequence[Output]) -> list[Any]:
    return [numbers(output.values[task]) for output in outputs]


def cohere(types: Sequence[str], texts: Sequence[str], int8_range: float | None) -> AnswerFormat:
    """The answer of Cohere's /v2/embed: a list of vectors for each type that was asked for.

    texts: the texts, which are sent back.
    """
    forms = {name: _cohere_form(name, int8_range) for name in types}
    size = sum(form.bytes_per_value for form in forms.values())
    return AnswerFormat(_write_cohere, (forms, texts), size, sum(map(len, texts)))


def _cohere_form(name: str, int8_range: float | None) -> NumberFormat:
    if name in ("float", "base64"):
        return NumberFormat(as_base64=name == "base64")
    return NumberFormat(cast("Number", name), int8_range=int8_range)


def _write_cohere(
    forms: dict[str, NumberFormat], texts: Sequence[str], outputs: Sequence[Output]
) -> dict[str, Any]:
    vectors = {
        name: [numbers(output.values["embed"], form) for output in outputs]
        for name, form in forms.items()
    }
    num_tokens = sum(output.num_tokens for output in outputs)
    return {
        "id": _id("embd"),
        "embeddings": vectors,
        "texts": list(texts),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
        "response_type": "embeddings_by_type",
    }


def predict(labels: tuple[str, ...], is_batch: bool) -> AnswerFormat:
    """The answer of TEI's /predict: the labels of each input, that with the highest score first.

    is_batch: whether the request had a list of inputs.
    """
    return AnswerFormat(_write_predictions, (labels, is_batch), JSON_BYTES)


def _write_predictions(
    labels: tuple[str, ...], is_batch: bool, outputs: Sequence[Output]
) -> list[Any]:
    rows = [
        [
            {"score": score, "label": labels[place]}
            for place, score in ranking(output.array("classify").tolist())
        ]
        for output in outputs
    ]
    return rows if is_batch else rows[0]


def similarity() -> AnswerFormat:
    """The answer of TEI's /similarity: the cosine of the first output with each other one."""
    return AnswerFormat(scores_of, (1,))


# --- scores ---------------------------------------------------------------------------------------


def scores_of(num_queries: int | None, outputs: Sequence[Output]) -> list[float]:
    """A score for each document.

    num_queries: None for a cross-encoder, which computes one number for each pair. Otherwise it is
        the number of outputs that belong to queries, and come first: one for all documents, or one
        for each. The score is the cosine of a document's vector with its query's.
    """
    if num_queries is None:
        return [float(np.asarray(output.values["classify"])[0]) for output in outputs]
    # [q + d, width]
    vectors = np.stack([np.asarray(output.values["embed"], np.float64) for output in outputs])
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    queries, documents = vectors[:num_queries], vectors[num_queries:]
    cosines: list[float] = (queries * documents).sum(-1).tolist()
    return cosines


def score(model: str, num_queries: int | None) -> AnswerFormat:
    """The answer of vLLM's /score: scores in the order of the pairs."""
    return AnswerFormat(_write_scores, (model, num_queries))


def _write_scores(model: str, num_queries: int | None, outputs: Sequence[Output]) -> dict[str, Any]:
    rows = [
        {"index": i, "object": "score", "score": value}
        for i, value in enumerate(scores_of(num_queries, outputs))
    ]
    return _listed("score", model, rows, outputs)


def rerank(
    model: str,
    num_queries: int | None,
    top_n: int | None = None,
    documents: Sequence[str] | None = None,
) -> AnswerFormat:
    """The answer of /v1/rerank as Cohere and Jina have it, the best document first.

    top_n: the number of documents in it; None for all.
    documents: the texts, if they are to be sent back with the scores.
    """
    args = (model, num_queries, top_n, documents)
    return AnswerFormat(_write_ranking, args, num_chars=sum(map(len, documents or ())))


def _write_ranking(
    model: str,
    num_queries: int | None,
    top_n: int | None,
    documents: Sequence[str] | None,
    outputs: Sequence[Output],
) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for i, value in ranking(scores_of(num_queries, outputs))[:top_n]:
        shown = {} if documents is None else {"document": {"text": documents[i]}}
        results.append({"index": i, "relevance_score": value, **shown})
    return {"id": _id("rerank"), "model": model, "results": results, "usage": _usage(outputs)}


def rerank_as_tei(num_queries: int | None, texts: Sequence[str] | None = None) -> AnswerFormat:
    """The answer of /rerank as TEI has it: a bare list, the best text first.

    texts: the texts, if they are to be sent back with the scores.
    """
    args = (num_queries, texts)
    return AnswerFormat(_write_ranking_as_tei, args, num_chars=sum(map(len, texts or ())))


def _write_ranking_as_tei(
    num_queries: int | None, texts: Sequence[str] | None, outputs: Sequence[Output]
) -> list[dict[str, Any]]:
    return [
        {"index": i, "score": value, **({} if texts is None else {"text": texts[i]})}
        for i, value in ranking(scores_of(num_queries, outputs))
    ]


def ranking(scores: Sequence[float]) -> list[tuple[int, float]]:
    """Pairs (index, score), the highest score first, equal scores in the order of the request."""
    return sorted(enumerate(scores), key=lambda item: -item[1])


# --- tokens ---------------------------------------------------------------------------------------


def tokenize_answer(
    token_ids: list[int], max_input_tokens: int, strings: list[str] | None
) -> dict[str, Any]:
    """The answer of vLLM's /tokenize."""
    return {
        "count": len(token_ids),
        "max_model_len": max_input_tokens,
        "tokens": token_ids,
        "token_strs": strings,
    }


# --- parts ----------------------------------------------------------------------------------------


def numbers(value: npt.NDArray[np.float32] | SparseVector, form: NumberFormat = FLOATS) -> Any:
    """The numbers of one output as a JSON value.

    A sparse vector becomes a list of objects with index and value. Other values become lists, or
    base64 text of little-endian numbers.

    value: float32 [dimensions], or [tokens, width] with a row for each token; or a SparseVector.
    """
    if isinstance(value, SparseVector):
        pairs = zip(value.token_ids.tolist(), value.weights.tolist(), strict=True)
        return [{"index": index, "value": weight} for index, weight in pairs]
    if form != FLOATS:
        value = converted(value, form.number, form.int8_range)
    return base64.b64encode(value.tobytes()).decode("ascii") if form.as_base64 else value.tolist()


def _listed(
    kind: str, model: str, rows: list[dict[str, Any]], outputs: Sequence[Output]
) -> dict[str, Any]:
    return {
        "id": _id(kind),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": rows,
        "usage": _usage(outputs),
    }


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _usage(outputs: Sequence[Output]) -> dict[str, int]:
    """The number of computed tokens: after truncation, with special tokens."""
    total = sum(output.num_tokens for output in outputs)
    return {"prompt_tokens": total, "total_tokens": total}
