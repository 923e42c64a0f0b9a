"""vLLM's answers in one piece, as JSON text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pydantic

from deployments.generator import endpoints
from deployments.generator.answers import sse
from deployments.requests.endpoints import Endpoint


async def text_of(endpoint: Endpoint, answer: pydantic.BaseModel) -> str:
    """An answer in one piece, as JSON text."""
    text = await json_of(answer, endpoints.SERVED[endpoint].dump)
    if endpoint == "messages" and not getattr(answer, "stop_sequence", None):
        return sse.without_stop_sequence(text)
    return text


async def json_of(
    answer: pydantic.BaseModel, dump: Mapping[str, Any] = endpoints.NO_OPTIONS
) -> str:
    """Return `answer` as JSON text.

    Several choices are dumped one at a time, because one with logprobs may be megabytes, and other
    tasks wait meanwhile.

    dump: arguments of `model_dump_json`.
    """
    choices = getattr(answer, "choices", ())
    if len(choices) < 2:
        return answer.model_dump_json(**dump)
    texts = []
    for choice in choices:
        texts.append(choice.model_dump_json())
        await asyncio.sleep(0)
    frame = answer.model_copy(update={"choices": []}).model_dump_json()
    before, after = frame.split('"choices":[]', 1)
    return f'{before}"choices":[{",".join(texts)}]{after}'
