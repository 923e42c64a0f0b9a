"""Answers of the routes that generate nothing: /v1/models, /tokenize, /render, adapters, ..."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import State
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest
from vllm.entrypoints.serve.lora.protocol import (
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
)
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from cfg_core.errors import RequestError
from cfg_core.lanes import num_chars
from deployments.generator import endpoints
from deployments.generator.answers.texts import json_of
from deployments.generator.engine.serving_engine import GeneratorEngine
from deployments.generator.http_context import HttpContext
from deployments.generator.media.in_bodies import check_body, reading_media
from deployments.generator.refusals.engine_errors import checked, own_errors, reading
from deployments.generator.refusals.validation import parse, parsed
from deployments.requests.endpoints import BODY_FIELDS, Endpoint


class SmallAnswers:
    """What one engine's serving classes answer at once. Its methods return JSON text.

    They raise as those of VllmServer do.

    max_text_chars: of texts that are only tokenized or rendered.
    """

    def __init__(self, engine: GeneratorEngine, state: State, max_text_chars: int) -> None:
        self._engine, self._state, self._max_text_chars = engine, state, max_text_chars

    async def models(self) -> str:
        with own_errors():
            models = await self._state.openai_serving_models.show_available_models()
            for card in models.data:
                card.root = card.id  # vLLM puts the model's directory here
            return str(models.model_dump_json())

    async def tokenize(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        """The answer of /tokenize, as JSON text whose `count` is the number of tokens."""
        field = "messages" if "messages" in body else "prompt"
        kind = TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest
        create = self._state.serving_tokenization.create_tokenize
        with self._reading(body.get(field), field):
            request = await parsed(kind, body, "messages")
            with self._reading_media("chat", body):
                return await json_of(checked(await create(request, HttpContext(headers))))

    async def detokenize(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        """The answer of /detokenize, as JSON text.

        The number of tokens is that of the body's `tokens`.
        """
        create = self._state.serving_tokenization.create_detokenize
        with self._reading(body.get("tokens"), "tokens"):
            request = parse(DetokenizeRequest, body)
            return await json_of(checked(await create(request, HttpContext(headers))))

    async def count_tokens(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        """The answer of /v1/messages/count_tokens, as JSON text."""
        count = self._state.anthropic_serving_messages.count_tokens
        with self._reading(json.dumps(body), "messages"):
            request = await parsed(AnthropicCountTokensRequest, body, "messages")
            with self._reading_media("messages", body):
                answer = checked(await count(request, HttpContext(headers)))
            return await json_of(answer, {"exclude_none": True})

    async def render(self, endpoint: Endpoint, body: dict[str, Any]) -> str:
        """What vLLM sends to its engine for a request of this endpoint, as JSON text."""
        with self._reading(json.dumps(body), "prompt"):
            conversation = BODY_FIELDS[endpoint].messages
            request = await parsed(endpoints.SERVED[endpoint].request, body, conversation)
            with self._reading_media(endpoint, body):
                made = await endpoints.rendered(endpoint, self._state, request)
            if isinstance(made, list):
                return f"[{','.join([one.model_dump_json() for one in made])}]"
            return str(made.model_dump_json())

    @contextmanager
    def _reading(self, value: object, field: str) -> Iterator[None]:
        """Read a body that is not for the engine, if the texts in `value` are not too long.

        A token counts as four characters.
        """
        with reading():
            size, most = num_chars(value), self._max_text_chars
            if size > most:
                raise RequestError(
                    f"{field} has {size} characters, and this server takes {most}: send it in"
                    " parts.",
                    field,
                )
            yield

    @contextmanager
    def _reading_media(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[None]:
        """While open, vLLM may read the media of a body that is not for the engine."""
        check_body(endpoint, body)
        with reading_media(self._engine.renderer, endpoint, body):
            yield

    async def load_adapter(self, body: dict[str, Any]) -> str:
        """Load an adapter; returns vLLM's sentence."""
        with reading():
            request = parse(LoadLoRAAdapterRequest, body)
            if self._engine.vllm_config.lora_config is None:
                raise RequestError(
                    "This engine was started without adapters: set `engine.enable_lora: true` in"
                    " the YAML."
                )
            models = self._state.openai_serving_models
            return str(checked(await models.load_lora_adapter(request)))

    async def unload_adapter(self, body: dict[str, Any]) -> str:
        """Unload an adapter; returns vLLM's sentence."""
        with reading():
            request = parse(UnloadLoRAAdapterRequest, body)
            models = self._state.openai_serving_models
            return str(checked(await models.unload_lora_adapter(request)))

    async def schemas(self) -> str:
        """JSON schemas of the bodies that vLLM's serving classes read, as JSON text."""
        return json.dumps(endpoints.schemas())
