"""JSON schemas of the answers that are this server's own, and what it adds to vLLM's.

They document the API (/openapi.json), and tests/serve/stories/test_openapi.py holds real answers
against them. The schemas of vLLM's answers come from the engine's vLLM.
"""

from __future__ import annotations

from cfg_core.params.field_table import COUNT, NUMBER, TEXT, Schema
from deployments.requests.encode.capabilities import EncodeEndpoint

NUMBERS = {"type": "array", "items": NUMBER}
MAYBE_NUMBER = {"type": ["number", "null"]}
SPARSE: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"index": COUNT, "value": NUMBER},
        "required": ["index", "value"],
    },
}


def closed(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """An object with these keys and no others; all but `optional` are always there."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


# ---- encoders ------------------------------------------------------------------------------------

USAGE = closed({"prompt_tokens": COUNT, "total_tokens": COUNT})


def _listed(row: Schema) -> Schema:
    """The list that most endpoints answer with."""
    return closed(
        {
            "id": TEXT,
            "object": {"const": "list"},
            "created": COUNT,
            "model": TEXT,
            "data": array(row),
            "usage": USAGE,
        }
    )


VECTOR: Schema = {"oneOf": [NUMBERS, {**TEXT, "description": "base64 of little-endian float32"}]}
RERANKED = closed(
    {
        "id": TEXT,
        "model": TEXT,
        "results": array(
            closed(
                {"index": COUNT, "relevance_score": NUMBER, "document": closed({"text": TEXT})},
                optional=("document",),
            )
        ),
        "usage": USAGE,
    }
)
RERANKED_TEI = array(closed({"index": COUNT, "score": NUMBER, "text": TEXT}, optional=("text",)))

PREDICTED = array(closed({"score": NUMBER, "label": TEXT}))

ENCODED: dict[EncodeEndpoint, Schema] = {
    "embeddings": _listed(
        closed({"object": {"const": "embedding"}, "index": COUNT, "embedding": VECTOR})
    ),
    "rerank": {"oneOf": [RERANKED, RERANKED_TEI]},
    "score": _listed(closed({"index": COUNT, "object": {"const": "score"}, "score": NUMBER})),
    "pooling": _listed(
        closed(
            {
                "object": {"const": "pooling"},
                "index": COUNT,
                "data": {"anyOf": [*VECTOR["oneOf"], array(NUMBERS), SPARSE]},
            }
        )
    ),
    "classify": _listed(
        closed({"index": COUNT, "label": TEXT, "probs": NUMBERS, "num_classes": COUNT})
    ),
    "embed_sparse": array(SPARSE),
    "cohere_embed": closed(
        {
            "id": TEXT,
            "embeddings": {
                "type": "object",
                "description": "A list of vectors for each type that was asked for.",
                "additionalProperties": array({"oneOf": [NUMBERS, TEXT]}),
            },
            "texts": array(TEXT),
            "meta": {"type": "object"},
            "response_type": {"const": "embeddings_by_type"},
        }
    ),
    "embed": array(NUMBERS),
    "embed_all": array(array(NUMBERS)),
    "predict": {"anyOf": [PREDICTED, array(PREDICTED)]},
    "similarity": NUMBERS,
}
"""The answers of encoders."""


# ---- other routes --------------------------------------------------------------------------------

JSON, PLAIN, EVENTS = "application/json", "text/plain", "text/event-stream"
CARD: Schema = {
    "type": "object",
    "properties": {
        "id": {**TEXT, "description": "The name that clients send as `model`."},
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "root": {"type": ["string", "null"]},
        "parent": {"type": ["string", "null"], "description": "Of an adapter: its base model."},
        "max_model_len": {"type": ["integer", "null"]},
    },
    "required": ["id", "object", "created", "owned_by"],
}
MODELS = closed({"object": {"const": "list"}, "data": array(CARD)})
READY: Schema = {
    "type": "object",
    "properties": {
        "status": {"const": "ready"},
        "engine": {
            "type": "object",
            "description": "Counts of the engine of one replica of the generator.",
        },
        "encoders": {
            "type": "object",
            "description": "What each encoder reports, by its served name.",
            "additionalProperties": {"type": "object"},
        },
    },
    "required": ["status", "encoders"],
}

OWN: dict[str, tuple[str, Schema] | None] = {
    "/v1/models": (JSON, MODELS),
    "/v1/models/{model}": (JSON, CARD),
    "/health": (JSON, closed({"status": {"const": "live"}})),
    "/ready": (JSON, READY),
    "/load": (JSON, closed({"server_load": COUNT})),
    "/version": (JSON, closed({"version": TEXT, "cfg_serve": TEXT})),
    "/metrics": (PLAIN, {**TEXT, "description": "Prometheus' text format."}),
    "/ping": None,
    "/tokenize": (
        JSON,
        closed(
            {
                "count": COUNT,
                "max_model_len": COUNT,
                "tokens": array(COUNT),
                "token_strs": {"type": ["array", "null"], "items": TEXT},
            }
        ),
    ),
    "/detokenize": (JSON, closed({"prompt": TEXT})),
    "/v1/load_lora_adapter": (PLAIN, TEXT),
    "/v1/unload_lora_adapter": (PLAIN, TEXT),
}
"""Content type and schema of the answer of each route that is not vLLM's; None: no content.

Those of the two routes for tokens are for servers without a generator.
"""

EVENT: Schema = {
    "type": "object",
    "description": "An event of OpenAI's Responses API. `response` is whole in the last one.",
    "properties": {
        "type": {**TEXT, "pattern": r"^(response\.|error$)"},
        "sequence_number": COUNT,
        "response": {"$ref": "#/components/schemas/ResponsesResponse"},
        "item": {"type": "object"},
        "part": {"type": "object"},
        "item_id": TEXT,
        "output_index": COUNT,
        "content_index": COUNT,
        "delta": TEXT,
        "text": TEXT,
        "logprobs": {"type": ["array", "null"]},
    },
    "required": ["type"],
}
"""One event of a stream of /v1/responses."""

RANKING: Schema = {"type": "object", "additionalProperties": NUMBER}
RANKED = array(
    {
        "type": "object",
        "properties": {"token": TEXT, "logprob": NUMBER, "bytes": {"type": ["array", "null"]}},
        "required": ["token", "logprob"],
    }
)

OF_STREAMS: dict[str, dict[str, Schema]] = {
    "CompletionLogProbs": {
        "conditional_logprobs": array(MAYBE_NUMBER),
        "negative_logprobs": {
            "type": "array",
            "items": {"oneOf": [{"type": "null"}, array(NUMBER)]},
            "description": "For each token a list with one entry for each follower.",
        },
        "guidance_kl": array(MAYBE_NUMBER),
        "guidance_strength": array(MAYBE_NUMBER),
        "conditional_top_logprobs": {
            **array({"oneOf": [{"type": "null"}, RANKING]}),
            "description": "For each token the conditional stream's own most likely ones.",
        },
        "negative_top_logprobs": {
            **array({"oneOf": [{"type": "null"}, array(RANKING)]}),
            "description": "For each token a list with one entry for each follower.",
        },
    },
    "ChatCompletionLogProbsContent": {
        "conditional_logprob": MAYBE_NUMBER,
        "negative_logprobs": {"oneOf": [{"type": "null"}, array(NUMBER)]},
        "guidance_kl": MAYBE_NUMBER,
        "guidance_strength": MAYBE_NUMBER,
        "conditional_top_logprobs": RANKED,
        "negative_top_logprobs": array(RANKED),
    },
}
"""What `guidance_logprobs` adds to vLLM's objects, by the names of their schemas."""
