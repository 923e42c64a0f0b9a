"""Answers that were cut, by their limit of tokens or by a stop string.

vLLM's streams tell what a cut answer has: the beginning of a tool call, and no text. Its whole
answers show the markup of that call as text, or call it finished. Here a whole answer that was cut
is read as its stream would be. In the Responses API, the item that was cut is `incomplete`, and so
is the last event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import pydantic_core
from openai.types.responses import ResponseOutputItemDoneEvent
from starlette.datastructures import State
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall, ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
)
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent, ResponsesResponse
from vllm.entrypoints.openai.responses.utils import build_response_output_items
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import Parser
from vllm.renderers.chat_utils import make_tool_call_id


class ParsedOutput(NamedTuple):
    """What a stream tells of an output."""

    reasoning: str | None
    content: str | None
    calls: list[FunctionCall]


class ResponseIncompleteEvent(ResponseCompletedEvent):  # type: ignore[misc] # not typed
    """The last event of a stream of /v1/responses that was cut."""

    type: Literal["response.incomplete"] = "response.incomplete"


def align_with_streams(state: State) -> None:
    """Make vLLM's serving classes tell of cut answers what their streams tell."""
    for chat in (state.openai_serving_chat, state.anthropic_serving_messages):
        _read_chats(chat)
    _read_responses(state.openai_serving_responses)
    _complete_messages(state.anthropic_serving_messages)


def is_cut(output: CompletionOutput) -> bool:
    """Whether an output ended because of its limit of tokens or of a stop string."""
    return output.finish_reason == "length" or isinstance(output.stop_reason, str)


def calls_tools(parser: type[Parser] | None, request: Any) -> bool:
    """Whether tool calls are read in the output of a request."""
    has_parser = parser is not None and parser.tool_parser_cls is not None
    return has_parser and bool(request.tools) and request.tool_choice != "none"


def read_as_stream(
    parser: Parser, output: CompletionOutput, request: Any, prompt_token_ids: Sequence[int] | None
) -> ParsedOutput:
    """What the stream of an output tells, as if it came in one chunk."""
    delta = parser.parse_delta(
        output.text,
        list(output.token_ids),
        request,
        prompt_token_ids=list(prompt_token_ids or ()),
        finished=True,
    )
    delta = delta or DeltaMessage()
    calls: dict[int, FunctionCall] = {}
    for told in delta.tool_calls:
        name = told.function.name if told.function else None
        if told.index not in calls:
            if name is None:
                continue
            calls[told.index] = FunctionCall(id=told.id, name=name, arguments="")
        if told.function and told.function.arguments:
            calls[told.index].arguments += told.function.arguments
    content = delta.content or None
    if not calls and request.tool_choice in ("auto", None):
        content = _with_end(parser, output.text, content)
    return ParsedOutput(delta.reasoning, content, list(calls.values()))


def _with_end(parser: Parser, text: str, content: str | None) -> str | None:
    """The content with its last characters, which a stream keeps back if a call may begin there.

    A text may end with `<`, or with a part of a tag that it is about.
    """
    tag = getattr(parser.tool_parser, "tool_call_start_token", "")
    kept_back = text.removeprefix(content or "")
    is_part = 0 < len(kept_back) < len(tag) and tag.startswith(kept_back)
    return text if is_part else content


# --- chats ----------------------------------------------------------------------------------------


class _Last:
    """Keeps the last output of a request."""

    output: RequestOutput | None = None

    async def of(self, outputs: Any) -> AsyncIterator[RequestOutput]:
        async with aclosing(outputs):
            async for output in outputs:
                self.output = output
                yield output


def _read_chats(serving: Any) -> None:
    full = serving.chat_completion_full_generator

    async def chat_completion_full_generator(
        request: Any, outputs: Any, *rest: Any, **more: Any
    ) -> Any:
        last = _Last()
        answer = await full(request, last.of(outputs), *rest, **more)
        is_whole = isinstance(answer, ChatCompletionResponse) and not request.echo
        if is_whole and calls_tools(serving.parser_cls, request):
            _tell_choices(serving, request, answer, last.output)
        return answer

    serving.chat_completion_full_generator = chat_completion_full_generator


def _tell_choices(
    serving: Any, request: Any, answer: ChatCompletionResponse, final: RequestOutput
) -> None:
    kwargs = serving._effective_chat_template_kwargs(request)
    for choice, output in zip(answer.choices, final.outputs, strict=True):
        if is_cut(output):
            parser = serving._make_parser(request, serving.renderer.tokenizer, kwargs)
            read = read_as_stream(parser, output, request, final.prompt_token_ids)
            _tell(choice, output, request, read)


def _tell(
    choice: ChatCompletionResponseChoice, output: CompletionOutput, request: Any, read: ParsedOutput
) -> None:
    """Make a choice tell what was read."""
    choice.message.reasoning = read.reasoning
    choice.message.content = read.content
    choice.message.tool_calls = [
        ToolCall(id=call.id or make_tool_call_id(), function=call) for call in read.calls
    ]
    is_named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
    called = bool(read.calls) and not is_named and output.finish_reason == "stop"
    choice.finish_reason = "tool_calls" if called else output.finish_reason
    maybe_filter_parallel_tool_calls(choice, request)


def _complete_messages(serving: Any) -> None:
    convert = serving.messages_full_converter

    def messages_full_converter(generator: ChatCompletionResponse) -> Any:
        for call in generator.choices[0].message.tool_calls:
            call.function.arguments = as_object(call.function.arguments)
        answer = convert(generator)
        answer.content = [part for part in answer.content if part.type != "text" or part.text]
        return answer

    serving.messages_full_converter = messages_full_converter


def as_object(arguments: str) -> str:
    """The arguments of a call as a JSON object: of a call that was cut, the members that are whole.

    Anthropic's `input` is an object, in a cut answer, too.
    """
    try:
        found = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        found = {}
    return json.dumps(found if isinstance(found, dict) else {}, ensure_ascii=False)


# --- responses ------------------------------------------------------------------------------------


def _read_responses(serving: Any) -> None:
    full = serving.responses_full_generator

    async def responses_full_generator(
        request: Any, params: Any, outputs: Any, context: Any, *rest: Any, **more: Any
    ) -> Any:
        answer = await full(request, params, outputs, context, *rest, **more)
        if isinstance(answer, ResponsesResponse):
            if _is_to_read(serving, request, context):
                answer.output = _items(serving, request, context, answer)
            if answer.status == "incomplete":
                _mark(answer.output)
        return answer

    serving.responses_full_generator = responses_full_generator


def _is_to_read(serving: Any, request: Any, context: Any) -> bool:
    if not isinstance(context, SimpleContext) or context.streamed_output_items is not None:
        return False
    return calls_tools(serving.parser, request) and is_cut(context.final_output.outputs[0])


def _items(serving: Any, request: Any, context: Any, answer: ResponsesResponse) -> list[Any]:
    """The items of a whole answer, as its stream tells them."""
    kwargs = serving._effective_chat_template_kwargs(request)
    parser = serving._make_response_parser(request, serving.renderer.get_tokenizer(), kwargs)
    final = context.final_output
    read = read_as_stream(parser, final.outputs[0], request, final.prompt_token_ids)
    messages = (item for item in answer.output if item.type == "message")
    texts = (part for item in messages for part in item.content if part.type == "output_text")
    items: list[Any] = build_response_output_items(
        reasoning=read.reasoning,
        content=read.content,
        tool_calls=maybe_filter_parallel_tool_calls(read.calls, request),
        logprobs=next((part.logprobs for part in texts), None),
        tools=request.tools,
    )
    return items


def _mark(items: Sequence[Any]) -> None:
    """Call the last item incomplete, if it has a status."""
    if items and "status" in type(items[-1]).model_fields:
        items[-1].status = "incomplete"


async def cut_events(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The events of a stream of /v1/responses; that of a cut answer ends as an incomplete one.

    Whether an item was cut is known at the end, so each event that ends one waits for the next.
    """
    held: ResponseOutputItemDoneEvent | None = None
    async for event in events:
        is_cut_here = (
            isinstance(event, ResponseCompletedEvent) and event.response.status == "incomplete"
        )
        if held is not None:
            if is_cut_here:
                _mark([held.item])
            yield held
            held = None
        if isinstance(event, ResponseOutputItemDoneEvent):
            held = event
        elif is_cut_here:
            yield ResponseIncompleteEvent(
                sequence_number=event.sequence_number, response=event.response
            )
        else:
            yield event
    if held is not None:
        yield held
