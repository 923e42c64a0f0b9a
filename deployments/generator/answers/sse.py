"""What is read from, and added to, the JSON texts and server-sent events that vLLM produces.

They pass through as strings. The guidance object goes where the usage is: into a whole answer, into
the last chunk before `[DONE]` of a completion or chat, into the `message_delta` event of
Anthropic's Messages API, and into the response in the last event of OpenAI's Responses API,
`response.completed` or `response.incomplete`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

from cfg_core.errors import CfgServeError, EngineError
from deployments.http.errors import error_of
from deployments.http.text_answers import DONE
from deployments.requests.endpoints import Endpoint

Report: TypeAlias = Callable[[], dict[str, Any] | None]
"""Makes the guidance object when the chunk that gets it is reached; None if there is none."""

_ERROR_PREFIX, _ERROR_EVENT = 'data: {"error"', "event: error\n"
_FINISHED = '"finish_reason":"'
_USAGE_ONLY = '"choices":[]'
# Quotes inside generated text are escaped in JSON (\"), so none of these can come from the model.
_MESSAGE_USAGE = "event: message_delta\n"
_RESPONSE_USAGE = ("event: response.completed\n", "event: response.incomplete\n")

MAX_PIECE_CHARS = 2**19


def pieces(text: str) -> Iterator[str]:
    """Cut a text, whatever its size, into pieces that fit a message between processes."""
    yield text[:MAX_PIECE_CHARS]
    for start in range(MAX_PIECE_CHARS, len(text), MAX_PIECE_CHARS):
        yield text[start : start + MAX_PIECE_CHARS]


def may_be_last(chunk: str) -> bool:
    """True for a chunk of a completion or chat after which `[DONE]` may follow."""
    return _FINISHED in chunk or _USAGE_ONLY in chunk


def with_guidance(text: str, report: dict[str, Any] | None) -> str:
    """Add the `guidance` object at the end of a JSON object, bare or as the data of an event."""
    end = text.rindex("}")
    return f'{text[:end]},"guidance":{json.dumps(report)}{text[end:]}'


def without_stop_sequence(text: str) -> str:
    """A message, as JSON text, that says that no stop sequence was met.

    Anthropic's answers always have the field. vLLM leaves out what is null.
    """
    return f'{text[: text.rindex("}")]},"stop_sequence":null}}'


def complete(text: str, report: dict[str, Any] | None) -> str:
    """A whole response, as JSON text, with the guidance object if there is a `report`."""
    return with_guidance(text, report) if report is not None else text


async def chunks(
    endpoint: Endpoint,
    stream: AsyncIterator[str],
    report: Report,
    failure: Callable[[], CfgServeError | None],
) -> AsyncIterator[str]:
    """Yield the events of a stream, with the guidance object in the one with the usage.

    Raises CfgServeError at the first event that reports a failure.

    failure: the reason of a failure, if it is known. vLLM's events do not always have it.
    """
    stream = _checked(stream, failure)
    if endpoint in ("completion", "chat"):
        stream = _reported_last(stream, report)
    async for chunk in stream:
        if chunk.startswith((_MESSAGE_USAGE, *_RESPONSE_USAGE)) and (told := report()) is not None:
            chunk = _reported(chunk, told)
        yield chunk


async def _checked(
    stream: AsyncIterator[str], failure: Callable[[], CfgServeError | None]
) -> AsyncIterator[str]:
    async for chunk in stream:
        if chunk.startswith((_ERROR_PREFIX, _ERROR_EVENT)):
            raise failure() or _told_error(chunk)
        yield chunk


def _told_error(chunk: str) -> CfgServeError:
    """The error that an event reports."""
    told = json.loads(chunk.partition("data: ")[2])
    error = told.get("error") or told
    code = error.get("code")
    if not isinstance(code, int):
        return EngineError(str(error.get("message")))
    return error_of(code, error["message"], error.get("param"))


async def _reported_last(stream: AsyncIterator[str], report: Report) -> AsyncIterator[str]:
    """Yield chunks of a completion or chat, with the report in the last one before `[DONE]`.

    Only a chunk that may be the last one is held back: one with a finish reason, or the usage
    chunk. It is sent when another chunk follows, and together with `[DONE]` if that follows.
    """
    held = ""
    async for chunk in stream:
        if held and chunk == DONE:
            held, chunk = "", complete(held, report()) + DONE
        elif held:
            yield held
            held = ""
        if chunk.endswith(DONE) or not may_be_last(chunk):
            yield chunk
        else:
            held = chunk


def _reported(event: str, report: dict[str, Any]) -> str:
    """An event with the usage of a message or a response, with the guidance object beside it."""
    if event.startswith(_MESSAGE_USAGE):
        return with_guidance(event, report)
    head, _, data = event.partition("data: ")
    told = json.loads(data)
    told["response"]["guidance"] = report
    return f"{head}data: {json.dumps(told, ensure_ascii=False, separators=(',', ':'))}\n\n"
