"""Tries every grammar in a sandbox before vLLM's frontend in a replica reads it.

vLLM reads some grammars early, in two places. Its request classes parse structural tags while they
validate a body, and its renderer parses grammars that are sent together with tools. `read_body`
runs before both. All other grammars, and those that vLLM makes from tools, pass
`AsyncLLM.add_request`, which calls `admit` (engine/serving_engine.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.grammars.bounds import KINDS, RESPONSE_FORMAT, STRUCTURED_OUTPUTS, TOOLS
from cfg_core.grammars.rewriting import readable
from cfg_core.vllm_plugin.frontend.admission import AdmissionError
from cfg_core.vllm_plugin.frontend.grammar_sandbox import MOST_NAMED, GrammarSandbox

_TAG = "structural_tag"
_tenant: ContextVar[str] = ContextVar("cfg_serve_grammar_tenant", default="")
_of_tools: ContextVar[bool] = ContextVar("cfg_serve_grammar_of_tools", default=False)


class GrammarGate(GrammarSandbox):
    """The sandbox of a replica: it knows which tenant a task works for."""

    def __init__(self, config: VllmConfig) -> None:
        """The process that compiles grammars begins to load, beside the engine."""
        super().__init__(config)
        self.begin()

    async def read_body(self, body: Mapping[str, Any], tenant: str) -> None:
        """Try the grammars of `body` that vLLM would read while it parses the body.

        What this task starts from now on counts for `tenant`. Raises RequestError or
        OverloadedError. Values of a wrong type are left to the parser.
        """
        _tenant.set(tenant)
        _of_tools.set(bool(body.get(TOOLS)) and not any(_early_fields({**body, TOOLS: [True]})))
        for field, schema in strict_schemas(body):
            await self._check_strict(field, schema, tenant)
        for params in _read_early(body):
            await self.check(params, tenant)

    async def _check_strict(self, field: str, schema: Any, tenant: str) -> None:
        """Raises RequestError if not all of a schema can be enforced. It names the field."""
        try:
            invalid = readable(schema)[1]
            if invalid:
                named = ", ".join(map(str, invalid[:MOST_NAMED]))
                raise RequestError(
                    f"The schema is strict, and {named} has no value that this server can enforce:"
                    " mend it, or leave `strict` out."
                )
            params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
            await self.check(params, tenant, strict=True)
        except RequestError as error:
            raise RequestError(f"{field}: {error}", field.partition(" ")[0]) from None

    async def admit(self, params: Any) -> None:
        """Try the grammar of a request that this task sends to the engine.

        Raises vLLM's own errors, with status 400 or 429.
        """
        if not isinstance(params, SamplingParams):
            return
        try:
            await self.check(params, _tenant.get(), of_tools=_of_tools.get())
        except RequestError as error:
            raise AdmissionError(error) from error
        except OverloadedError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from error


def _read_early(body: Mapping[str, Any]) -> Iterator[SamplingParams]:
    """The grammars of a body that vLLM reads before the request is with the engine."""
    for fields in _early_fields(body):
        try:
            yield SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
        except (TypeError, ValueError, ValidationError, VLLMValidationError):
            continue


def _early_fields(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    beside_tools = bool(body.get(TOOLS))
    outputs, answer = body.get(STRUCTURED_OUTPUTS), body.get(RESPONSE_FORMAT)
    if isinstance(outputs, Mapping):
        wanted = KINDS if beside_tools else (_TAG,)
        yield {name: outputs[name] for name in wanted if outputs.get(name) is not None}
    if isinstance(answer, Mapping) and answer.get("type") == _TAG:
        yield {_TAG: json.dumps(answer)}
    if beside_tools:
        yield from ({"json": holder["schema"]} for _, holder in _answer_formats(body))


def strict_schemas(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of a body that say `strict: true`, each with its field.

    Anthropic's `output_config` is always strict: its documents promise a 400 for what cannot be
    enforced.
    """
    for field, holder in _answer_formats(body):
        if holder.get("strict") is True or field.startswith("output_config"):
            yield f"{field}.schema", holder["schema"]
    tools = body.get(TOOLS)
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        yield from _strict_tool(number, tool)


def _strict_tool(number: int, tool: Any) -> Iterator[tuple[str, Any]]:
    """The schema of a strict tool of a chat, of a response or of a message."""
    if not isinstance(tool, Mapping):
        return
    inner = tool.get("function")
    function, path = (inner, ".function") if isinstance(inner, Mapping) else (tool, "")
    for key in ("parameters", "input_schema"):
        if function.get("strict") is True and function.get(key) is not None:
            yield f"tools[{number}]{path}.{key} (tool {function.get('name')!r})", function[key]


def _answer_formats(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What has the schema of an answer, with its field: in a chat, a response and a message."""
    for name, inner in (
        (RESPONSE_FORMAT, "json_schema"),
        ("text", "format"),
        ("output_config", "format"),
    ):
        answer = body.get(name)
        holder = answer.get(inner) if isinstance(answer, Mapping) else None
        if isinstance(holder, Mapping) and holder.get("schema") is not None:
            yield f"{name}.{inner}", holder
