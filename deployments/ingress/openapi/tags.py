"""The groups in which /docs shows the routes."""

from __future__ import annotations

from typing import NamedTuple


class Tag(NamedTuple):
    """A group of routes: those at or under one of `paths`. Of two such paths the longer decides."""

    name: str
    description: str
    paths: tuple[str, ...]


TAGS = (
    Tag(
        "Generate",
        "OpenAI's and Anthropic's routes for text. Their bodies take the guidance fields, such as"
        " guidance_scale and negative_prompt. Their answers say in `guidance` what was guided.",
        (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/generative_scoring",
            "/invocations",
        ),
    ),
    Tag(
        "Encode",
        "Embeddings, reranking, scores and classes of texts, by the encoders beside the generator.",
        (
            "/v1/embeddings",
            "/v1/rerank",
            "/v2/rerank",
            "/rerank",
            "/v1/score",
            "/score",
            "/pooling",
            "/v1/classify",
            "/classify",
            "/v2/embed",
            "/embed",
            "/embed_all",
            "/embed_sparse",
            "/predict",
            "/similarity",
        ),
    ),
    Tag(
        "Tokens and prompts",
        "What a model would read, without generating: text as tokens and back, and rendered chats.",
        (
            "/tokenize",
            "/detokenize",
            "/v1/messages/count_tokens",
            "/v1/completions/render",
            "/v1/chat/completions/render",
            "/v1/responses/render",
            "/v1/messages/render",
        ),
    ),
    Tag(
        "Models",
        "Which models are served. To load an adapter, a key needs that right.",
        ("/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ),
    Tag(
        "Operate",
        "For balancers and monitoring: whether the server lives, whether it can answer, its load.",
        ("/health", "/ready", "/ping", "/load", "/metrics", "/version"),
    ),
)
"""In the order of the page."""

DESCRIBED = [{"name": tag.name, "description": tag.description} for tag in TAGS]
"""The groups as an OpenAPI document has them."""


def tags_of(path: str) -> list[str]:
    """The name of the group that a route belongs to, in a list; an empty list if none has it."""
    found = [
        (len(above), tag.name)
        for tag in TAGS
        for above in tag.paths
        if path == above or path.startswith(f"{above}/")
    ]
    return [max(found)[1]] if found else []
