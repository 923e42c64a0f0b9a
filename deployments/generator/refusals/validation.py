"""A body becomes an object of vLLM's request classes, without holding up the event loop.

Validation by pydantic keeps all threads waiting, and takes up to 0.15 ms for a message of
/v1/responses. So a long body is validated in a thread, a part of its conversation at a time.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pydantic
from pydantic_core import SchemaValidator
from vllm.exceptions import VLLMClientError

from cfg_core.errors import RequestError
from deployments.generator.refusals.engine_errors import WRONG_SHAPE, unnamed
from deployments.generator.refusals.faults import Fault, fault_of, fault_of_item

LONG_VALUES = 1000
"""A body of more objects, lists and other values is validated in a thread."""

PART = 128
"""Entries of a conversation that are validated without a pause: for about 10 ms."""

_NEEDED = ("model", "max_tokens")
"""Fields that a class of requests may need besides the conversation."""

PRIVATE = {"pydantic:BaseModel": ("__pydantic_core_schema__",)}
"""Names of pydantic that are used here and are not in its reference."""

_LISTS = ("list", "tuple", "set", "frozenset")

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


def parse(model: type[pydantic.BaseModel], body: dict[str, Any]) -> Any:
    """Return `body` as vLLM's request object.

    Raises RequestError that names the field at fault: the first one, if a list has several.
    """
    try:
        request = validator_of(model).validate_python(body)
    except pydantic.ValidationError as error:
        raise _refused(fault_of(model, body, error), error) from None
    except WRONG_SHAPE as error:
        # vLLM's validators read fields before their types are checked.
        fault = None if isinstance(error, VLLMClientError) else fault_of(model, body)
        if fault is None:
            raise
        raise _refused(fault, error) from None
    _read_contents(model, request, body)
    return request


def _read_contents(model: type[pydantic.BaseModel], request: Any, body: dict[str, Any]) -> None:
    """Check the parts of messages, which pydantic leaves to the first reader of the list."""
    for places, message in _messages(getattr(request, "messages", ())):
        content = message.get("content")
        if not isinstance(content, Iterator):
            continue
        try:
            message["content"] = list(content)
        except pydantic.ValidationError as error:
            raise _refused(fault_of_item(model, body, "messages", *places), error) from None


def _messages(messages: Any) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """The messages of a conversation, or of several, with their places."""
    for place, message in enumerate(messages):
        if isinstance(message, dict):
            yield (place,), message
        elif isinstance(message, list):
            yield from (((place, *rest), one) for rest, one in _messages(message))


def _refused(fault: Fault | None, error: Exception) -> RequestError:
    if fault is None:
        return RequestError(unnamed(error))
    return RequestError(fault.sentence, fault.field or None)


@cache
def validator_of(model: type[pydantic.BaseModel]) -> SchemaValidator:
    """The validator of a class, which reads each list up to its first fault.

    Pydantic's own collects all faults: 2,000 empty items of /v1/responses have 466,000, which takes
    eight seconds.
    """
    schema = copy.deepcopy(model.__pydantic_core_schema__)
    rest: list[Any] = [schema]
    seen = set()
    while rest:
        part = rest.pop()
        if not isinstance(part, dict | list | tuple) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict) and part.get("type") in _LISTS:
            part["fail_fast"] = True
        rest.extend(part.values() if isinstance(part, dict) else part)
    return SchemaValidator(schema)
