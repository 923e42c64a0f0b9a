"""Which endpoints a model of an encoder can serve.

Imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Task

EncodeEndpoint = Literal[
    "embeddings",
    "rerank",
    "score",
    "pooling",
    "classify",
    "embed_sparse",
    "cohere_embed",
    "embed",
    "embed_all",
    "predict",
    "similarity",
]

PATHS: dict[EncodeEndpoint, str] = {
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/score",
    "pooling": "/pooling",
    "classify": "/classify",
    "embed_sparse": "/embed_sparse",
    "cohere_embed": "/v2/embed",
    "embed": "/embed",
    "embed_all": "/embed_all",
    "predict": "/predict",
    "similarity": "/similarity",
}
"""The path of each endpoint, as error messages and /v1/models show it."""


def can_serve(info: ModelInfo, endpoint: EncodeEndpoint) -> bool:
    """Whether this model can compute what the endpoint returns."""
    if endpoint in ("rerank", "score"):
        return info.takes_pairs or "embed" in info.tasks or info.max_sim is not None
    needed: dict[str, Task] = {
        "embeddings": "embed",
        "classify": "classify",
        "embed_sparse": "sparse",
        "cohere_embed": "embed",
        "embed": "embed",
        "embed_all": "token_embed",
        "predict": "classify",
        "similarity": "embed",
    }
    return endpoint == "pooling" or needed[endpoint] in info.tasks


def invoked(body: Mapping[str, Any]) -> EncodeEndpoint:
    """The endpoint that a body without a path is for, by its fields."""
    if "query" in body and ("documents" in body or "texts" in body):
        return "rerank"
    return "embeddings" if "input" in body else "score"


def meant_at_root(body: Mapping[str, Any], embeds: bool) -> EncodeEndpoint:
    """The endpoint of TEI that a body sent to `/` is for, by its fields and its model.

    embeds: whether the model can embed.
    """
    inputs = body.get("inputs")
    if "query" in body:
        return "rerank"
    if isinstance(inputs, Mapping) and "source_sentence" in inputs:
        return "similarity"
    return "embed" if embeds else "predict"


def paths_of(info: ModelInfo) -> list[str]:
    """The paths of the endpoints that this model can serve."""
    return [path for endpoint, path in PATHS.items() if can_serve(info, endpoint)]


def cannot_serve(name: str, info: ModelInfo, endpoint: EncodeEndpoint) -> RequestError:
    """The error for a model that cannot serve the endpoint.

    It says what the model computes, and which endpoints to use.
    """
    computes = ", ".join(info.tasks)
    if info.labels:
        computes = "one score for a pair" if info.takes_pairs else f"{len(info.labels)} labels"
    instead = ", ".join(paths_of(info))
    return RequestError(
        f"{name} computes {computes}, so it cannot serve {PATHS[endpoint]}: use {instead}.", "model"
    )
