"""A long body becomes an object of vLLM's request classes without holding up the event loop.

Validation by pydantic keeps all threads waiting, and takes up to 0.15 ms for a message of
/v1/responses. So a long body is validated in a thread, a part of its conversation at a time.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pydantic

from cfg_core.errors import RequestError
from deployments.generator.engine_errors import parse

LONG_VALUES = 1000
"""A body of more objects, lists and other values is validated in a thread."""

PART = 128
"""Entries of a conversation that are validated without a pause: for about 10 ms."""

_NEEDED = ("model", "max_tokens")
"""Fields that a class of requests may need besides the conversation."""

_thread = ThreadPoolExecutor(1, "validation")


async def parsed(
    model: type[pydantic.BaseModel], body: dict[str, Any], conversation: str | None = None
) -> Any:
    """As `parse`, in a thread if the body is long. Long bodies wait for each other.

    conversation: the field with the messages, which are validated in parts.
    """
    if not has_more_values(body, LONG_VALUES):
        return parse(model, body)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread, _in_parts, model, body, conversation)


def _in_parts(model: type[pydantic.BaseModel], body: dict[str, Any], field: str | None) -> Any:
    items = body.get(field or "")
    if field is None or not isinstance(items, list) or len(items) <= PART:
        return parse(model, body)
    request = parse(model, {**body, field: items[:PART]})
    needed = {name: body[name] for name in _NEEDED if name in body}
    for start in range(PART, len(items), PART):
        try:
            part = parse(model, {**needed, field: items[start : start + PART]})
        except RequestError as error:
            raise _moved(error, field, start) from None
        getattr(request, field).extend(getattr(part, field))
    return request


def _moved(error: RequestError, field: str, by: int) -> RequestError:
    """The error of a part, with the index that the entry at fault has in the whole list."""

    def moved(text: str) -> str:
        entry = re.compile(rf"\b{field}\[(\d+)\]")
        return entry.sub(lambda found: f"{field}[{int(found[1]) + by}]", text)

    return RequestError(moved(error.message), error.param and moved(error.param))


def has_more_values(value: object, most: int) -> bool:
    """Whether there are more than `most` values in JSON, without the numbers of lists of these."""
    count, rest = 0, [value]
    while rest and count <= most:
        inner = rest.pop()
        if isinstance(inner, dict):
            count += len(inner)
            rest.extend(inner.values())
        elif isinstance(inner, list) and not (inner and isinstance(inner[0], int)):
            count += len(inner)
            rest.extend(inner[: most + 1])
    return count > most
