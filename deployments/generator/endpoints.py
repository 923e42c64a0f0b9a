"""How vLLM's own serving classes serve each endpoint that generates text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import pydantic
from pydantic import TypeAdapter
from starlette.datastructures import State
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
)
from vllm.entrypoints.generate.generative_scoring.serving import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeCompletionRequest,
    TokenizeResponse,
)

from cfg_core.errors import GuidanceError
from deployments.generator.answers.incomplete import cut_events
from deployments.generator.refusals.engine_errors import checked
from deployments.generator.refusals.validation import parsed
from deployments.requests.endpoints import BODY_FIELDS, Endpoint

NO_OPTIONS: Mapping[str, bool] = MappingProxyType({})


Model: TypeAlias = type[pydantic.BaseModel]


class Served(NamedTuple):
    """One endpoint that generates text.

    request, answer: the classes of its requests and of its whole answers.
    event: the class of the events of its streams; None without streams, and for /v1/responses,
        whose events have no class in common.
    serving: the attribute of the server's state that serves it.
    create: the method that answers a request, with a model or with an iterator over a stream.
    dump: how vLLM writes an answer as JSON.
    """

    request: Model
    answer: Model
    event: Model | None
    serving: str
    create: str
    dump: Mapping[str, bool] = NO_OPTIONS


SERVED: dict[Endpoint, Served] = {
    "completion": Served(
        CompletionRequest,
        CompletionResponse,
        CompletionStreamResponse,
        "openai_serving_completion",
        "create_completion",
    ),
    "chat": Served(
        ChatCompletionRequest,
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
        "openai_serving_chat",
        "create_chat_completion",
    ),
    "responses": Served(
        ResponsesRequest,
        ResponsesResponse,
        None,
        "openai_serving_responses",
        "create_responses",
        {"by_alias": True},
    ),
    "messages": Served(
        AnthropicMessagesRequest,
        AnthropicMessagesResponse,
        AnthropicStreamEvent,
        "anthropic_serving_messages",
        "create_messages",
        {"exclude_none": True},
    ),
    "batch": Served(
        BatchChatCompletionRequest,
        ChatCompletionResponse,
        None,
        "openai_serving_chat_batch",
        "create_batch_chat_completion",
    ),
    "scoring": Served(
        GenerativeScoringRequest,
        GenerativeScoringResponse,
        None,
        "serving_generative_scoring",
        "create_generative_scoring",
    ),
}

OTHERS: dict[str, tuple[Model | None, Model | None]] = {
    "count_tokens": (AnthropicCountTokensRequest, AnthropicCountTokensResponse),
    "load_adapter": (LoadLoRAAdapterRequest, None),
    "unload_adapter": (UnloadLoRAAdapterRequest, None),
    "tokenize": (TokenizeCompletionRequest, TokenizeResponse),
    "detokenize": (DetokenizeRequest, DetokenizeResponse),
    "render": (None, GenerateRequest),
}
"""The classes of requests that generate nothing, and of their answers.

`render` is one prompt of the routes that render.
"""


def schemas() -> dict[str, Any]:
    """JSON schemas of all requests and answers, for OpenAPI.

    `components` has them by the names of their classes. `names`, `answers` and `events` have these
    names by endpoint: of requests, of whole answers, and of the events of streams.
    """
    rows: list[tuple[str, Model | None, Model | None, Model | None]] = [
        *((name, row.request, row.answer, row.event) for name, row in SERVED.items()),
        *((name, request, answer, None) for name, (request, answer) in OTHERS.items()),
    ]
    made, shared = TypeAdapter.json_schemas(
        [
            ((kind, name), "validation" if kind == "names" else "serialization", TypeAdapter(model))
            for name, *models in rows
            for kind, model in zip(("names", "answers", "events"), models, strict=True)
            if model is not None
        ],
        ref_template="#/components/schemas/{model}",
    )
    found: dict[str, Any] = {"names": {}, "answers": {}, "events": {}}
    for ((kind, name), _), schema in made.items():
        found[kind][name] = schema["$ref"].rsplit("/", 1)[1]
    return {**found, "components": shared["$defs"]}


async def create(endpoint: Endpoint, state: State, request: Any, context: Any) -> Any:
    """vLLM's answer to a request: a model, or an iterator over the events of its stream.

    Raises CfgServeError for vLLM's error object, and whatever vLLM raises.
    """
    served = SERVED[endpoint]
    answer = checked(await getattr(getattr(state, served.serving), served.create)(request, context))
    is_whole = isinstance(answer, pydantic.BaseModel)
    return answer if is_whole or endpoint != "responses" else _events(answer)


async def _events(stream: Any) -> AsyncIterator[str]:
    """The events of the Responses API as texts, as vLLM's route writes them."""
    async for event in cut_events(stream):
        yield f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


async def rendered(endpoint: Endpoint, state: State, request: Any) -> Any:
    """What vLLM would send to its engine for a request: a model, or several for several prompts.

    Raises CfgServeError for vLLM's error object, and whatever vLLM raises.
    """
    serving = state.serving_render
    render = {
        "completion": serving.render_completion_request,
        "chat": serving.render_chat_request,
        "messages": serving.render_messages_request,
        "responses": serving.render_responses_request,
    }
    return checked(await render[endpoint](request))


async def render(
    endpoint: Endpoint, state: State, body: dict[str, Any], conversation: str
) -> Mapping[str, Any]:
    """The prompt of a body as vLLM's renderer makes it: token ids, media, or embeddings.

    vLLM's cache of processed media is left alone, because what it holds it believes to be with the
    engine. Raises RequestError if the body cannot be rendered, and GuidanceError if it has what a
    follower cannot have here.

    conversation: the field that can hold a conversation, for that error.
    """
    request = await parsed(SERVED[endpoint].request, body, BODY_FIELDS[endpoint].messages)
    if endpoint in ("messages", "responses"):
        made = await rendered(endpoint, state, request)
        if made.features:
            raise GuidanceError(
                f"Here the negative stream must be text: send {conversation} without images or"
                " audio, or send the request to /v1/chat/completions."
            )
        return {"type": "token", "prompt_token_ids": list(made.token_ids)}
    renderer = state.online_renderer
    if endpoint == "chat":
        (prompt, *_) = checked(await renderer.render_chat(request, skip_mm_cache=True))[1]
    else:
        (prompt, *_) = checked(await renderer.render_completion(request, skip_mm_cache=True))
    if prompt["type"] not in ("token", "multimodal", "embeds"):
        raise GuidanceError("the negative stream must not have an encoder's prompt.")
    found: Mapping[str, Any] = prompt
    return found
