"""JSON schemas of the fields that this server adds to vLLM's bodies, and of encoders' bodies.

They document the API (/openapi.json). The code that reads the fields checks them. The schemas of
vLLM's own bodies come from the engine's vLLM.
"""

from __future__ import annotations

from typing import Any

from cfg_core.params.field_table import COUNT, FLAG, IDS, TEXT, Schema
from cfg_core.params.fields import ROWS, SYNONYMS
from cfg_core.params.guidance import TABLE
from cfg_core.prefill_only.vector_formats import NUMBERS
from deployments.requests.encode.capabilities import PATHS, EncodeEndpoint
from deployments.requests.encode.field_checks import SMALL
from deployments.requests.encode.prompts import INPUT_TYPES


def _field(description: str, **schema: Any) -> Schema:
    return {**schema, "description": description}


TEXTS = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
INPUTS = {"oneOf": [TEXT, IDS, {"type": "array", "items": {"oneOf": [TEXT, IDS]}}]}

GUIDANCE: dict[str, Schema] = {
    **TABLE.schemas(),
    **{
        other: _field(f"Another name of {row.name}.", **row.kind.schema)
        for other, name in SYNONYMS.items()
        for row in ROWS
        if row.name == name
    },
}
"""The guidance fields of a conversation. A completion has no `negative_messages`, and no `messages`
in its streams."""

SERVER: dict[str, Schema] = {
    "timeout": _field("Seconds after which the request ends with an error.", type="number"),
    "logits_processors": _field(
        "Logits processors of this request, by the names in the server's configuration.",
        type="array",
        items={"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
    ),
}
"""Fields of every body that generates text, guided or not."""

_COMMON: dict[str, Schema] = {
    "model": _field("The served name. May be left out if only one encoder can answer.", **TEXT),
    "timeout": SERVER["timeout"],
    "messages": _field("Refused: for chat models.", type="null"),
    "add_special_tokens": _field("false is refused: texts get the special tokens.", **FLAG),
    "truncate_prompt_tokens": _field("Cut inputs to so many tokens; -1: to the longest.", **COUNT),
    "truncate": _field("Cut inputs to the longest, or from which side.", oneOf=[FLAG, TEXT]),
    "truncation_side": _field("From where to cut.", enum=["left", "right"]),
    "truncation_direction": _field("As truncation_side, in TEI's format.", **TEXT),
}
_INPUT_TYPE = _field(
    f"What the texts are, which chooses the model's prompt: {', '.join(INPUT_TYPES)}.", **TEXT
)
_PROMPT: dict[str, Schema] = {
    "prompt": _field("Text put in front of each input.", **TEXT),
    "prompt_name": _field("The name of a prompt of the model.", **TEXT),
    "input_type": _INPUT_TYPE,
}
_ACTIVATION: dict[str, Schema] = {
    "use_activation": _field("Whether to normalise or to apply the model's activation.", **FLAG),
    "normalize": _field("As use_activation.", **FLAG),
}
_INSTRUCTION = {
    "instruction": _field("What makes a document relevant, for rerankers with a prompt.", **TEXT)
}
_COMPARED = {
    "task": _field(
        "Which vectors are compared, for models that make both kinds.",
        enum=["embed", "token_embed"],
    )
}
_FORMAT = {
    "encoding_format": _field("How vectors are sent.", enum=["float", "base64", *SMALL]),
    "embed_dtype": _field("The type of vectors' numbers.", enum=list(NUMBERS)),
    "output_dtype": _field("As embed_dtype.", enum=list(NUMBERS)),
}
_DIMENSIONS = {"dimensions": _field("Cut each vector to this length.", **COUNT)}


def _body(required: list[str], *fields: dict[str, Schema]) -> Schema:
    properties = {name: schema for part in (*fields, _COMMON) for name, schema in part.items()}
    return {"type": "object", "properties": properties, "required": required}


ENCODE: dict[EncodeEndpoint, Schema] = {
    "embeddings": _body(
        ["input"],
        {"input": _field("Texts or token ids.", **INPUTS)},
        _PROMPT,
        _ACTIVATION,
        _FORMAT,
        _DIMENSIONS,
    ),
    "rerank": _body(
        ["query"],
        {
            "query": _field("What the documents are ranked for.", **TEXT),
            "documents": _field("Texts, in Cohere's and Jina's format.", **TEXTS),
            "texts": _field("Texts, in TEI's format.", **TEXTS),
            "top_n": _field("Return only the best.", **COUNT),
            "return_documents": _field("Return the texts, too.", **FLAG),
            "return_text": _field("As return_documents, in TEI's format.", **FLAG),
            "raw_scores": _field("Scores without the activation, in TEI's format.", **FLAG),
        },
        _INSTRUCTION,
        _COMPARED,
        _ACTIVATION,
    ),
    "score": _body(
        [],
        {
            name: _field(f"Texts, compared with {other}.", **TEXTS)
            for name, other in (
                ("text_1", "text_2"),
                ("text_2", "text_1"),
                ("queries", "documents or items"),
                ("documents", "queries"),
                ("items", "queries"),
                ("data_1", "data_2"),
                ("data_2", "data_1"),
            )
        },
        _INSTRUCTION,
        _COMPARED,
        _ACTIVATION,
    ),
    "pooling": _body(
        ["input"],
        {
            "input": _field("Texts, token ids, or pairs of texts.", **INPUTS),
            "task": _field("What to compute; default: the model's first task.", **TEXT),
        },
        _PROMPT,
        _INSTRUCTION,
        _ACTIVATION,
        _FORMAT,
        _DIMENSIONS,
    ),
    "classify": _body(
        ["input"],
        {"input": _field("Texts, token ids, or pairs of texts.", **INPUTS)},
        _PROMPT,
        _INSTRUCTION,
        _ACTIVATION,
    ),
    "embed_sparse": _body(["inputs"], {"inputs": _field("Texts.", **TEXTS)}, _PROMPT),
    "cohere_embed": _body(
        [],
        {
            "texts": _field("Texts.", type="array", items=TEXT),
            "inputs": _field("Objects whose `content` is a list of parts with text.", type="array"),
            "images": _field("Refused: encoders read no images.", type="null"),
            "input_type": _INPUT_TYPE,
            "embedding_types": _field(
                "Types of the answer's vectors; default: float.",
                type="array",
                items={"enum": ["float", "base64", *SMALL]},
            ),
            "output_dimension": _field("Cut each vector to this length.", **COUNT),
            "max_tokens": _field("Cut inputs to so many tokens.", **COUNT),
        },
    ),
    "embed": _body(
        ["inputs"],
        {
            "inputs": _field("Texts or token ids.", **INPUTS),
            "normalize": _field("Whether vectors are normalised; default: true.", **FLAG),
        },
        _PROMPT,
        _DIMENSIONS,
    ),
    "embed_all": _body(["inputs"], {"inputs": _field("Texts or token ids.", **INPUTS)}, _PROMPT),
    "predict": _body(
        ["inputs"],
        {
            "inputs": _field(
                "A text, a pair of texts as a list, or a list of lists of one text or two."
            ),
            "raw_scores": _field("Scores without the activation.", **FLAG),
        },
        _INSTRUCTION,
    ),
    "similarity": _body(
        ["inputs"],
        {
            "inputs": {
                "type": "object",
                "description": "What is compared.",
                "properties": {"source_sentence": TEXT, "sentences": TEXTS},
                "required": ["source_sentence", "sentences"],
            },
            "parameters": _field(
                "`truncate`, `truncation_direction`, `prompt_name`.", type="object"
            ),
        },
    ),
}
"""The bodies of encoders' requests."""

USER = {"role": "user", "content": "Why does the sea taste of salt?"}
PIRATE = {"role": "system", "content": "You are a pirate. Speak like one."}
NEGATIVE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}
SHORT = {"max_tokens": 48, "temperature": 0}

EXAMPLES: dict[str, Schema] = {
    "/v1/completions": {
        "prompt": "Tell me a story about the sea.\n",
        **SHORT,
        "guidance_scale": 1.5,
        "negative_prompt": "Tell me a story.\n",
    },
    "/v1/chat/completions": {"messages": [PIRATE, USER], **SHORT, **NEGATIVE},
    "/v1/responses": {
        "instructions": PIRATE["content"],
        "input": USER["content"],
        "max_output_tokens": 48,
        "temperature": 0,
        **NEGATIVE,
    },
    "/v1/messages": {"system": PIRATE["content"], "messages": [USER], **SHORT, **NEGATIVE},
    "/v1/chat/completions/batch": {"messages": [[USER], [PIRATE, USER]], **SHORT},
    "/generative_scoring": {
        "query": "Is the sea salty?",
        "items": [" Yes.", " No."],
        "label_token_ids": [5, 6],
    },
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/completions/render": {"prompt": "Once upon a time"},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/responses/render": {"input": USER["content"]},
    "/v1/messages/render": {"messages": [USER], "max_tokens": 48},
    "/v1/load_lora_adapter": {"lora_name": "pirate", "lora_path": "/adapters/pirate"},
    "/v1/unload_lora_adapter": {"lora_name": "pirate"},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/invocations": {"messages": [PIRATE, USER], **SHORT, **NEGATIVE},
}
"""A body for each path that generates text or reads prompts, without `model`."""

ENCODE_EXAMPLES: dict[EncodeEndpoint, Schema] = {
    "embeddings": {"input": ["The sea is salty.", "Bread is baked."]},
    "rerank": {
        "query": "Why is the sea salty?",
        "documents": ["Rivers carry salt into the sea.", "Bread is baked."],
    },
    "score": {"text_1": "Why is the sea salty?", "text_2": "Rivers carry salt into the sea."},
    "pooling": {"input": "The sea is salty."},
    "classify": {"input": "The sea is salty."},
    "embed_sparse": {"inputs": "The sea is salty."},
    "cohere_embed": {
        "texts": ["The sea is salty."],
        "input_type": "search_document",
        "embedding_types": ["float", "ubinary"],
    },
    "embed": {"inputs": "The sea is salty."},
    "embed_all": {"inputs": "The sea is salty."},
    "predict": {"inputs": "The sea is salty."},
    "similarity": {
        "inputs": {
            "source_sentence": "Why is the sea salty?",
            "sentences": ["Rivers carry salt into the sea.", "Bread is baked."],
        }
    },
}

ENCODE_PATHS: dict[str, EncodeEndpoint] = {
    **{path: endpoint for endpoint, path in PATHS.items()},
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "score",
    "/v1/classify": "classify",
}
"""Every path of an encoder's endpoint, the second names included."""
