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
from typing import Any

import numpy as np
import numpy.typing as npt

from cfg_core.prefill_only.types import Output, SparseVector, Task
from cfg_core.prefill_only.vector_formats import BITS, BYTES, Number, bytes_of, converted
from deployments.requests.encode.scores import Compared, scores_of

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
    return AnswerFormat(scores_of, (Compared(1),))


# --- scores ---------------------------------------------------------------------------------------


def _held(compared: Compared | None) -> float:
    return 0.0 if compared is None else compared.bytes_per_value


def score(model: str, compared: Compared | None) -> AnswerFormat:
    """The answer of vLLM's /score: scores in the order of the pairs."""
    return AnswerFormat(_write_scores, (model, compared), _held(compared))


def _write_scores(
    model: str, compared: Compared | None, outputs: Sequence[Output]
) -> dict[str, Any]:
    rows = [
        {"index": i, "object": "score", "score": value}
        for i, value in enumerate(scores_of(compared, outputs))
    ]
    return _listed("score", model, rows, outputs)


def rerank(
    model: str,
    compared: Compared | None,
    top_n: int | None = None,
    documents: Sequence[str] | None = None,
) -> AnswerFormat:
    """The answer of /v1/rerank as Cohere and Jina have it, the best document first.

    top_n: the number of documents in it; None for all.
    documents: the texts, if they are to be sent back with the scores.
    """
    args = (model, compared, top_n, documents)
    num_chars = sum(map(len, documents or ()))
    return AnswerFormat(_write_ranking, args, _held(compared), num_chars)


def _write_ranking(
    model: str,
    compared: Compared | None,
    top_n: int | None,
    documents: Sequence[str] | None,
    outputs: Sequence[Output],
) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for i, value in ranking(scores_of(compared, outputs))[:top_n]:
        shown = {} if documents is None else {"document": {"text": documents[i]}}
        results.append({"index": i, "relevance_score": value, **shown})
    return {"id": new_id("rerank"), "model": model, "results": results, "usage": _usage(outputs)}


def rerank_as_tei(compared: Compared | None, texts: Sequence[str] | None = None) -> AnswerFormat:
    """The answer of /rerank as TEI has it: a bare list, the best text first.

    texts: the texts, if they are to be sent back with the scores.
    """
    args = (compared, texts)
    num_chars = sum(map(len, texts or ()))
    return AnswerFormat(_write_ranking_as_tei, args, _held(compared), num_chars)


def _write_ranking_as_tei(
    compared: Compared | None, texts: Sequence[str] | None, outputs: Sequence[Output]
) -> list[dict[str, Any]]:
    return [
        {"index": i, "score": value, **({} if texts is None else {"text": texts[i]})}
        for i, value in ranking(scores_of(compared, outputs))
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
        "id": new_id(kind),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": rows,
        "usage": _usage(outputs),
    }


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _usage(outputs: Sequence[Output]) -> dict[str, int]:
    """The number of computed tokens: after truncation, with special tokens."""
    total = sum(output.num_tokens for output in outputs)
    return {"prompt_tokens": total, "total_tokens": total}
