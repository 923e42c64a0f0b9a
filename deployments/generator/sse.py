"""What is read from, and added to, the JSON texts and server-sent events that vLLM produces.

They pass through as strings. In a guided stream, only a chunk that may be the last one before
`[DONE]` is held back: one with a finish reason, or the usage chunk. It is sent when another chunk
follows. If `[DONE]` follows, it gets the `guidance` object first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from cfg_core.errors import EngineError
from deployments.http.errors import error_of
from deployments.http.events import DONE

_ERROR_PREFIX = 'data: {"error"'
_FINISHED = '"finish_reason":"'
_ABORTED = '"finish_reason":"abort"'
_USAGE_ONLY = '"choices":[]'
# Quotes inside generated text are escaped in JSON (\"), so none of these can come from the model.


MAX_PIECE_CHARS = 2**19


def pieces(text: str) -> Iterator[str]:
    """Cut a text, whatever its size, into pieces that fit a message between processes."""
    yield text[:MAX_PIECE_CHARS]
    for start in range(MAX_PIECE_CHARS, len(text), MAX_PIECE_CHARS):
        yield text[start : start + MAX_PIECE_CHARS]


def may_be_last(chunk: str) -> bool:
    """True for a chunk after which `[DONE]` may follow."""
    return _FINISHED in chunk or _USAGE_ONLY in chunk


def check_complete(text: str) -> None:
    """Raise a CfgServeError if a chunk or a response reports a failure.

    That is an error object, or output that was cut off by an abort. When a request is aborted
    because its client left, nobody reads its output. So an abort that is seen here is a failure.
    """
    if text.startswith(_ERROR_PREFIX):
        error = json.loads(text[6:])["error"]
        raise error_of(error["code"], error["message"], error["param"])
    if _ABORTED in text:
        raise EngineError(
            "The engine stopped before the output was complete: send the request again."
        )


def with_guidance(text: str, report: dict[str, Any] | None) -> str:
    """Add the `guidance` object at the end of a JSON object, bare or as the data of an event."""
    end = text.rindex("}")
    return f'{text[:end]},"guidance":{json.dumps(report)}{text[end:]}'


def complete(text: str, report: dict[str, Any] | None) -> str:
    """A whole response, as JSON text, with the guidance object if there is a `report`."""
    check_complete(text)
    return with_guidance(text, report) if report is not None else text


async def checked_chunks(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield `chunks` as they are.

    Raises CfgServeError at the first one that reports a failure.
    """
    async for chunk in chunks:
        check_complete(chunk)
        yield chunk


async def guided_chunks(
    chunks: AsyncIterator[str], report: Callable[[], dict[str, Any] | None]
) -> AsyncIterator[str]:
    """Yield `chunks`, with the guidance object in the last one before `[DONE]`.

    report: called when that chunk is reached.
    """
    held = ""
    async for chunk in checked_chunks(chunks):
        if held:
            yield with_guidance(held, report()) if chunk == DONE else held
        held = chunk if may_be_last(chunk) else ""
        if not held:
            yield chunk
