"""Answers of encoders: callables that turn the outputs of an engine into JSON values.

Each answer is a small immutable object that knows what its request asked for. The ingress makes it
(jobs.py). The replica calls it, and encodes the result as JSON text.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cfg_core.prefill_only.types import Output, SparseVector, Task

JSON_BYTES, BASE64_BYTES, SPARSE_BYTES = 22.0, 16 / 3, 45.0
"""Estimated bytes of one number in an answer.

The number is decimal text of a float32, four bytes in base64, or an object with index and value.
"""


class Wording(Protocol):
    """The type of all answers: called with outputs, it returns the JSON value for the client.

    outputs: those of all calls of a job, in order.
    bytes_per_value: estimated bytes in the answer for each number in the outputs; 0 if the answer
    does not contain these numbers.
    num_chars: characters of the request's texts that the answer sends back.
    """

    @property
    def bytes_per_value(self) -> float: ...

    @property
    def num_chars(self) -> int: ...

    def __call__(self, outputs: Sequence[Output]) -> Any: ...


class _Numbers:
    """The base of answers that send no texts back."""

    @property
    def num_chars(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class EmbeddingsAnswer(_Numbers):
    """The answer of /v1/embeddings: OpenAI's list of embeddings."""

    model: str
    base64: bool

    @property
    def bytes_per_value(self) -> float:
        return BASE64_BYTES if self.base64 else JSON_BYTES

    def __call__(self, outputs: Sequence[Output]) -> dict[str, Any]:
        rows = [
            {
                "object": "embedding",
                "index": i,
                "embedding": numbers(output.values["embed"], self.base64),
            }
            for i, output in enumerate(outputs)
        ]
        return _listed("embd", self.model, rows, outputs)


@dataclass(frozen=True, kw_only=True)
class PoolingAnswer(_Numbers):
    """The answer of vLLM's /pooling: whatever the task computes."""

    model: str
    task: Task
    base64: bool

    @property
    def bytes_per_value(self) -> float:
        if self.task == "sparse":
            return SPARSE_BYTES
        return BASE64_BYTES if self.base64 else JSON_BYTES

    def __call__(self, outputs: Sequence[Output]) -> dict[str, Any]:
        rows = [
            {
                "object": "pooling",
                "index": i,
                "data": numbers(output.values[self.task], self.base64),
            }
            for i, output in enumerate(outputs)
        ]
        return _listed("pool", self.model, rows, outputs)


@dataclass(frozen=True, kw_only=True)
class ClassifyAnswer(_Numbers):
    """The answer of vLLM's /classify: a score for each label, and the label with the highest."""

    model: str
    labels: tuple[str, ...]

    @property
    def bytes_per_value(self) -> float:
        return JSON_BYTES

    def __call__(self, outputs: Sequence[Output]) -> dict[str, Any]:
        rows = [
            self._row(i, np.asarray(output.values["classify"])) for i, output in enumerate(outputs)
        ]
        return _listed("classify", self.model, rows, outputs)

    def _row(self, index: int, scores: npt.NDArray[np.float32]) -> dict[str, Any]:
        label = self.labels[int(scores.argmax())]
        return {
            "index": index,
            "label": label,
            "probs": scores.tolist(),
            "num_classes": len(scores),
        }


@dataclass(frozen=True)
class SparseAnswer(_Numbers):
    """The answer of TEI's /embed_sparse: a list of sparse vectors."""

    @property
    def bytes_per_value(self) -> float:
        return SPARSE_BYTES

    def __call__(self, outputs: Sequence[Output]) -> list[Any]:
        return [numbers(output.values["sparse"]) for output in outputs]


# --- scores ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The scores of a cross-encoder, which computes one number for each pair."""

    def __call__(self, outputs: Sequence[Output]) -> list[float]:
        return [float(np.asarray(output.values["classify"])[0]) for output in outputs]


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """The cosine of each document's vector with its query's vector.

    num_queries: the number of outputs that belong to queries. They come first: one for all
    documents, or one for each.
    """

    num_queries: int

    def __call__(self, outputs: Sequence[Output]) -> list[float]:
        # [q + d, width]
        vectors = np.stack([np.asarray(output.values["embed"], np.float64) for output in outputs])
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        queries, documents = vectors[: self.num_queries], vectors[self.num_queries :]
        cosines: list[float] = (queries * documents).sum(-1).tolist()
        return cosines


@dataclass(frozen=True, kw_only=True)
class ScoreAnswer(_Numbers):
    """The answer of vLLM's /score: scores in the order of the pairs."""

    model: str
    scores: Scores | Cosine

    @property
    def bytes_per_value(self) -> float:
        return 0.0

    def __call__(self, outputs: Sequence[Output]) -> dict[str, Any]:
        rows = [
            {"index": i, "object": "score", "score": score}
            for i, score in enumerate(self.scores(outputs))
        ]
        return _listed("score", self.model, rows, outputs)


@dataclass(frozen=True, kw_only=True)
class RerankAnswer:
    """The answer of /v1/rerank as Cohere and Jina have it, the best document first.

    top_n: the number of documents in it; None for all.
    documents: the texts, if they are to be sent back with the scores.
    """

    model: str
    scores: Scores | Cosine
    top_n: int | None = None
    documents: Sequence[str] | None = None

    @property
    def bytes_per_value(self) -> float:
        return 0.0

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.documents or ()))

    def __call__(self, outputs: Sequence[Output]) -> dict[str, Any]:
        best = ranking(self.scores(outputs))[: self.top_n]
        results = [{"index": i, "relevance_score": score, **self._document(i)} for i, score in best]
        return {
            "id": _id("rerank"),
            "model": self.model,
            "results": results,
            "usage": _usage(outputs),
        }

    def _document(self, index: int) -> dict[str, Any]:
        return {} if self.documents is None else {"document": {"text": self.documents[index]}}


@dataclass(frozen=True, kw_only=True)
class TeiRerankAnswer:
    """The answer of /rerank as TEI has it: a bare list, the best text first.

    texts: the texts, if they are to be sent back with the scores.
    """

    scores: Scores | Cosine
    texts: Sequence[str] | None = None

    @property
    def bytes_per_value(self) -> float:
        return 0.0

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts or ()))

    def __call__(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        best = ranking(self.scores(outputs))
        return [
            {"index": i, "score": score, **({} if self.texts is None else {"text": self.texts[i]})}
            for i, score in best
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


def numbers(value: npt.NDArray[np.float32] | SparseVector, as_base64: bool = False) -> Any:
    """The numbers of one output as a JSON value.

    A sparse vector becomes a list of objects with index and value. Other values become lists, or
    base64 text of little-endian float32.

    value: float32 [dimensions], or [tokens, width] with a row for each token; or a SparseVector.
    """
    if isinstance(value, SparseVector):
        pairs = zip(value.token_ids.tolist(), value.weights.tolist(), strict=True)
        return [{"index": index, "value": weight} for index, weight in pairs]
    if as_base64:
        return base64.b64encode(np.ascontiguousarray(value, dtype="<f4").tobytes()).decode("ascii")
    return value.tolist()


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
