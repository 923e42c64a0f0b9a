"""From what VllmServer yields to what Ray's LLMServer passes on to its ingress."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import BaseModel

from cfg_core.errors import CfgServeError
from deployments.http.errors import http_error
from deployments.http.text_answers import error_event
from deployments.messages import Chunk, Whole
from deployments.ray_llm.ray_names import ErrorInfo, ErrorResponse


async def ray_answers(
    items: AsyncGenerator[Chunk | Whole, None], answer: type[BaseModel]
) -> AsyncGenerator[str | BaseModel, None]:
    """Yield the events of a stream as texts, or one object of the class `answer`.

    A request that is refused gets Ray's object for errors in the place of both. A stream that fails
    later ends with an error event.
    """
    texts: list[str] = []
    is_stream = False
    try:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, Whole):
                    texts.append(item.text)
                else:
                    is_stream = True
                    yield item.text
    except CfgServeError as error:
        yield error_event(error) if is_stream else ray_error(error)
        return
    if texts:
        yield answer(**json.loads("".join(texts)))


def ray_error(error: CfgServeError) -> BaseModel:
    """Ray's object for an error. Its ingress answers with the status in `code`."""
    found: BaseModel = ErrorResponse(error=ErrorInfo(**http_error(error).body["error"]))
    return found
