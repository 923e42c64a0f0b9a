"""The OpenAPI document of this server: its routes, with the schemas of their bodies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from cfg_core.params.field_table import Schema
from deployments.ingress.openapi.answer_schemas import (
    ENCODED,
    EVENT,
    EVENTS,
    JSON,
    OF_STREAMS,
    OWN,
    array,
)
from deployments.ingress.openapi.schemas import (
    ENCODE,
    ENCODE_EXAMPLES,
    ENCODE_PATHS,
    EXAMPLES,
    GUIDANCE,
    SERVER,
)
from deployments.ingress.openapi.tags import DESCRIBED, tags_of
from deployments.requests.endpoints import BODY_FIELDS, Endpoint

GENERATED: dict[str, Endpoint] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/chat/completions/batch": "batch",
    "/generative_scoring": "scoring",
}
GUIDED = frozenset(path for path, endpoint in GENERATED.items() if BODY_FIELDS[endpoint].guided)

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

RENDERED = tuple(path for path in READ if path.endswith("/render"))

Content: TypeAlias = dict[str, Schema]
"""The schemas of an answer by content type."""

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
        "rule": {"type": "object", "description": "Instead of scale: guidance_rule."},
        "streams": {
            "type": "integer",
            "description": "Streams of a choice; 1 if not guided, or with a suffix.",
        },
        "negative_prompt_tokens": {
            "type": "integer",
            "description": "Tokens of the followers' own prompts, or of the suffix.",
        },
        "guided_tokens": {"type": "integer", "description": "Output tokens that were guided."},
        "gate_closed_tokens": {
            "type": "integer",
            "description": "With guidance_min_entropy or markers: output tokens that were not.",
        },
        "mean_strength": {
            "type": ["number", "null"],
            "description": "With a trust region or a gate: how much of the blend's push a token got"
            " on average, from 0 to 1. With a rule: the average scale. null without tokens.",
        },
        "full_strength_tokens": {
            "type": "integer",
            "description": "With a trust region or a gate: tokens that got all of it.",
        },
        "scored_tokens": {"type": "integer", "description": "guidance_score_tokens, if asked."},
        "note": {"type": "string", "description": "Which field had no effect, and why."},
    },
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
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
        description=(
            "OpenAI-compatible API with classifier-free guidance. Try a route with its example:"
            " Try it out, then Execute."
        ),
        routes=routes,
        tags=DESCRIBED,
    )
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {"GuidanceReport": REPORT, "Error": ERROR}
    bodies = {**_encoders(), **_engines(engine, schemas)}
    answers = {**_own_answers(), **_answers_of_engines(engine, schemas)}
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            if method == "post" and path in bodies:
                schema, example, kind = bodies[path]
                _add_body(operation, schema, {"model": models.get(kind, ""), **example})
            _add_answers(operation, answers.get(path, {}))
            operation["tags"] = tags_of(path)
    return made


def _add_body(operation: dict[str, Any], schema: Schema, example: Schema) -> None:
    content = {"schema": schema, "example": example}
    operation["requestBody"] = {"required": True, "content": {"application/json": content}}


def _add_answers(operation: dict[str, Any], content: Content) -> None:
    """Say what the operation answers. Without content, the answer has none."""
    error = {JSON: {"schema": _ref("Error")}}
    answer: dict[str, Any] = {"description": "The answer."}
    if content:
        answer["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    operation["responses"] = {
        "200": answer,
        "default": {"description": "An error.", "content": error},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _own_answers() -> dict[str, Content]:
    """The answers of the routes that are not vLLM's, by path."""
    of_encoders = {path: {JSON: ENCODED[endpoint]} for path, endpoint in ENCODE_PATHS.items()}
    return of_encoders | {path: {} if made is None else dict([made]) for path, made in OWN.items()}


def _answers_of_engines(
    engine: Mapping[str, Any] | None, schemas: dict[str, Any]
) -> dict[str, Content]:
    """The answers of vLLM's routes by path; adds what guidance adds to `schemas`."""
    if engine is None:
        return {}
    answers, events = engine["answers"], engine["events"]
    report = {"guidance": _ref("GuidanceReport")}
    for path in GUIDED:
        for names in (answers, events):
            if (name := names.get(GENERATED[path])) is not None:
                schemas[name].setdefault("properties", {}).update(report)
    for name, fields in OF_STREAMS.items():
        if name in schemas:
            schemas[name]["properties"] |= fields
    made: dict[str, Content] = {}
    for path, endpoint in {**GENERATED, **READ}.items():
        if endpoint in answers:
            made[path] = {JSON: _ref(answers[endpoint])}
        if endpoint in events:
            made[path][EVENTS] = _ref(events[endpoint])
    made["/v1/responses"][EVENTS] = EVENT
    for path in RENDERED:
        made[path] = {JSON: _ref(answers["render"])}
    made["/v1/completions/render"] = {JSON: array(_ref(answers["render"]))}
    whole = [_ref(answers["chat"]), _ref(answers["completion"])]
    return made | {"/invocations": {JSON: {"anyOf": [*whole, *ENCODED.values()]}}}


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
    for endpoint in BODY_FIELDS:
        properties = schemas[names[endpoint]].setdefault("properties", {})
        properties |= {**SERVER, **(guidance_of(endpoint) if BODY_FIELDS[endpoint].guided else {})}
    paths = {**GENERATED, **READ}
    made = {
        path: ({"$ref": f"#/components/schemas/{names[name]}"}, EXAMPLES[path], "generator")
        for path, name in paths.items()
    }
    return made | {"/invocations": ({"type": "object"}, EXAMPLES["/invocations"], "generator")}


def guidance_of(endpoint: Endpoint) -> dict[str, Schema]:
    """The guidance fields of an endpoint's bodies, without those of conversations elsewhere."""
    fields = copy.deepcopy(GUIDANCE)
    if BODY_FIELDS[endpoint].messages is None:
        del fields["negative_messages"]
        del fields["guidance_streams"]["items"]["properties"]["messages"]
    return fields
