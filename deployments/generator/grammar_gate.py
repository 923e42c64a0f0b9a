"""Tries every grammar in a sandbox before vLLM's frontend in a replica reads it.

vLLM reads some grammars early, in two places. Its request classes parse structural tags while they
validate a body, and its renderer parses grammars that are sent together with tools. `read_body`
runs before both. All other grammars, and those that vLLM makes from tools, pass
`AsyncLLM.add_request`.


Importing this module imports vllm, so only a replica does it.
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
from vllm.v1.engine.async_llm import AsyncLLM

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.grammars.bounds import KINDS, RESPONSE_FORMAT, STRUCTURED_OUTPUTS, TOOLS
from cfg_core.vllm_plugin.frontend.admission import RefusedError
from cfg_core.vllm_plugin.frontend.grammar_sandbox import GrammarSandbox

_TAG = "structural_tag"
_tenant: ContextVar[str] = ContextVar("cfg_serve_grammar_tenant", default="")


class GrammarGate:
    """Wraps `add_request` of one AsyncLLM in place, by `guard`."""

    def __init__(self, config: VllmConfig) -> None:
        """The process that compiles grammars begins to load, beside the engine."""
        self._sandbox = GrammarSandbox(config)
        self._sandbox.begin()

    async def guard(self, engine: AsyncLLM) -> None:
        """Try the grammars of all requests of `engine` from now on.

        Returns when they can be tried, so that the first one does not wait for seconds. A process
        that cannot be loaded is loaded again for the first grammar.
        """
        self._admit = engine.add_request
        engine.add_request = self.add_request
        await self._sandbox.loaded()

    async def read_body(self, body: Mapping[str, Any], tenant: str) -> None:
        """Try the grammars of `body` that vLLM would read while it parses the body.

        What this task starts from now on counts for `tenant`. Raises RequestError or
        OverloadedError. Values of a wrong type are left to the parser.
        """
        _tenant.set(tenant)
        for params in _read_early(body):
            await self._sandbox.check(params, tenant)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As AsyncLLM.add_request, for grammars that pass.

        Others raise vLLM's own errors, with status 400 or 429.
        """
        if isinstance(params, SamplingParams):
            try:
                await self._sandbox.check(params, _tenant.get())
            except RequestError as error:
                raise RefusedError(error) from error
            except OverloadedError as error:
                raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from error
        return await self._admit(request_id, prompt, params, *args, **kwargs)

    def close(self) -> None:
        self._sandbox.close()


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
        yield from ({"json": schema} for schema in _schemas(body))


def _schemas(body: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of a body's answer: of a chat, a response and a message."""
    for name, inner in (
        (RESPONSE_FORMAT, "json_schema"),
        ("text", "format"),
        ("output_config", "format"),
    ):
        answer = body.get(name)
        schema = answer.get(inner) if isinstance(answer, Mapping) else None
        if isinstance(schema, Mapping) and schema.get("schema") is not None:
            yield schema["schema"]
