"""Types of the prefill-only engine.

All other modules import this one. It imports none of them, and it does not import torch.

A caller hands in *inputs* (a text, a pair of texts, or token ids). The input processor makes one
*sequence* of each, the scheduler puts sequences into *batches*, and each sequence ends as one
*output*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cfg_core.errors import RequestError

Task: TypeAlias = Literal["embed", "sparse", "token_embed", "classify"]
"""What a model can compute for a sequence. The names are vLLM's.

embed: one vector.

sparse: weights of vocabulary tokens.

token_embed: one vector for each token.

classify: one number for each label. A reranker is a classifier with one label.
"""

TASKS: tuple[Task, ...] = ("embed", "sparse", "token_embed", "classify")

Role: TypeAlias = Literal["query", "document"]
"""What a text is to a model with late interaction."""

Input: TypeAlias = str | tuple[str, str] | Sequence[int]
"""A text, a pair of texts (query, document), or the token ids of a whole sequence.

Token ids must include the special tokens.
"""

FloatArray: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request, which hold for all of its inputs."""

    tasks: tuple[Task, ...] = ("embed",)
    """All of them are computed from one forward."""
    prompt: str = ""
    """Text to put in front of each text, as sentence-transformers does with its prompts.

    For pairs of a reranker with a template, it is the instruction. Empty: the template's own.
    """
    role: Role = "document"
    """What the texts are. Only models with late interaction tell queries from documents."""
    truncate_to: int | None = None
    """Keep at most this many tokens, special tokens included.

    None: an input that is too long is an error.
    """
    truncation_side: Literal["left", "right"] = "right"
    """The side that is cut off."""
    dimensions: int | None = None
    """Keep only the first so many components of dense vectors.

    Only Matryoshka models are trained for that.
    """
    normalize: bool | None = None
    """L2-normalise dense vectors. None: as the checkpoint says."""
    raw_scores: bool = False
    """Leave out the activation (sigmoid or softmax) of classifiers."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One input on its way through the engine: the unit of scheduling. Compared by identity."""

    token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None
    options: RequestOptions
    index: int
    """Index of the input in its request. Errors name it."""
    prompt_length: int = 0
    """Leading tokens that pooling leaves out, for checkpoints with `include_prompt: false`."""
    num_unseen: int = 0
    """Trailing tokens that no token attends to: those that fill up a query."""
    num_skips: int = 0
    """Number of batches that took a later sequence of the queue and not this one."""
    due: float = 0.0
    """Its place in the queue, in tokens. Only the scheduler uses it."""
    cancelled: bool = False
    request: Any = field(default=None, repr=False)
    """The request that it belongs to, an object that only the engine looks into.

    The scheduler compares it, to let requests take turns.
    """
    tenant: str = ""
    """Who sent it. The scheduler lets tenants share."""
    weight: float = 1.0
    """Share of its tenant, relative to other tenants."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Weights of vocabulary tokens.

    token_ids: int64 [n], ascending.

    weights: float32 [n], greater than 0.
    """

    token_ids: npt.NDArray[np.int64]
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Output:
    """What was computed for one input: a value for each task that was asked for.

    embed: float32 [dimensions].

    sparse: a SparseVector.

    token_embed: float32 [tokens, width].

    classify: float32 [labels].
    """

    values: Mapping[Task, FloatArray | SparseVector]
    num_tokens: int
    """Number of tokens that were computed: after truncation, special tokens included."""

    @property
    def num_values(self) -> int:
        """How many numbers all values hold together, without the token ids of sparse vectors."""
        return sum(
            v.weights.size if isinstance(v, SparseVector) else v.size for v in self.values.values()
        )

    def array(self, task: Task) -> FloatArray:
        """The value of a task whose values are arrays: any task but `sparse`."""
        value = self.values[task]
        assert not isinstance(value, SparseVector)
        return value

    @property
    def sparse(self) -> SparseVector:
        value = self.values["sparse"]
        assert isinstance(value, SparseVector)
        return value


def too_many_values(num_values: int, limit: int) -> RequestError:
    """The error for a request whose outputs hold too many numbers for one answer."""
    return RequestError(
        f"this answer would hold {num_values} numbers, and this server sends {limit} at most: send"
        " fewer or shorter inputs, or ask for base64, whose numbers are shorter.",
        "input",
    )
