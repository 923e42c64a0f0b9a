"""The OpenAPI document of this server: its routes, with the schemas of their bodies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from deployments.requests.endpoints import SHAPES, Endpoint
from deployments.requests.schemas import (
    ENCODE,
    ENCODE_EXAMPLES,
    ENCODE_PATHS,
    EXAMPLES,
    GUIDANCE,
    SERVER,
    Schema,
)

GENERATED: dict[str, Endpoint] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/chat/completions/batch": "batch",
    "/generative_scoring": "scoring",
}
GUIDED = frozenset(path for path, endpoint in GENERATED.items() if SHAPES[endpoint].guided)

READ: dict[str, str] = {
    "/v1/completions/render": "completion",
    "/v1/chat/completions/render": "chat",
    "/v1/responses/render": "responses",
    "/v1/messages/render": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/load_lora_adapter": "load_adapter",
    "/v1/unload_lora_adapter": "unload_adapter",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
"""Paths that generate nothing, with the schema of the engine that their bodies have."""

REPORT: Schema = {
    "type": "object",
    "description": "What was guided, beside `usage`.",
    "properties": {
        "scale": {"type": "number", "description": "guidance_scale; 1 is off."},
        "weights": {
            "type": "array",
            "items": {"type": "number"},
            "description": "Instead of scale: of all streams, the conditional one's first.",
        },
        "schedule": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}},
            "description": "Instead of scale: guidance_schedule.",
        },
        "streams": {"type": "integer", "description": "Streams of a choice; 1 if not guided."},
        "negative_prompt_tokens": {
            "type": "integer",
            "description": "Tokens of the followers' own prompts.",
        },
        "guided_tokens": {"type": "integer", "description": "Output tokens from joint steps."},
        "note": {"type": "string", "description": "Which field had no effect, and why."},
    },
}
ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and what to do."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}


def document(
    routes: Sequence[BaseRoute], engine: Mapping[str, Any] | None, models: Mapping[str, str]
) -> dict[str, Any]:
    """The OpenAPI document of `routes`.

    engine: the schemas of vLLM's bodies, as `endpoints.schemas` of the replica makes them; None
    without a generator.
    models: the served names that examples use, by the kind `generator` or `encoder`.
    """
    made = get_openapi(
        title="cfg-serve",
        version="1",
        description="OpenAI-compatible API with classifier-free guidance.",
        routes=routes,
    )
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {"GuidanceReport": REPORT, "Error": ERROR}
    bodies = {**_encoders(), **_engines(engine, schemas)}
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            if method == "post" and path in bodies:
                schema, example, kind = bodies[path]
                _add_body(operation, schema, {"model": models.get(kind, ""), **example})
                _add_answers(operation, is_guided=path in GUIDED)
    return made


def _add_body(operation: dict[str, Any], schema: Schema, example: Schema) -> None:
    content = {"schema": schema, "example": example}
    operation["requestBody"] = {"required": True, "content": {"application/json": content}}


def _add_answers(operation: dict[str, Any], is_guided: bool) -> None:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation["responses"]["default"] = {"description": "An error.", "content": error}
    if is_guided:
        report = {"guidance": {"$ref": "#/components/schemas/GuidanceReport"}}
        answer = {"application/json": {"schema": {"type": "object", "properties": report}}}
        operation["responses"]["200"]["content"] = answer


def _encoders() -> dict[str, tuple[Schema, Schema, str]]:
    return {
        path: (ENCODE[endpoint], ENCODE_EXAMPLES[endpoint], "encoder")
        for path, endpoint in ENCODE_PATHS.items()
    }


def _engines(
    engine: Mapping[str, Any] | None, schemas: dict[str, Any]
) -> dict[str, tuple[Schema, Schema, str]]:
    """Body, example and kind of model of each path of the generator; adds to `schemas`."""
    if engine is None:
        return {}
    schemas |= copy.deepcopy(engine["components"])
    names: Mapping[str, str] = engine["names"]
    for endpoint in SHAPES:
        properties = schemas[names[endpoint]].setdefault("properties", {})
        properties |= {**SERVER, **(guidance_of(endpoint) if SHAPES[endpoint].guided else {})}
    paths = {**GENERATED, **READ}
    made = {
        path: ({"$ref": f"#/components/schemas/{names[name]}"}, EXAMPLES[path], "generator")
        for path, name in paths.items()
    }
    return made | {"/invocations": ({"type": "object"}, EXAMPLES["/invocations"], "generator")}


def guidance_of(endpoint: Endpoint) -> dict[str, Schema]:
    """The guidance fields of an endpoint's bodies, without those of conversations elsewhere."""
    fields = copy.deepcopy(GUIDANCE)
    if SHAPES[endpoint].messages is None:
        del fields["negative_messages"]
        del fields["guidance_streams"]["items"]["properties"]["messages"]
    return fields
