"""The field of a body that an error of vLLM is about, where vLLM names none or another.

vLLM converts each body into its own parameters, and its errors name these. Some name nothing but in
words, and some show a Python value.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployments.requests.endpoints import BODY_FIELDS, Endpoint

_PYTHON = re.compile(r":? \{'.*\}", re.DOTALL)
_QUOTED = re.compile(r"`(\w+)`|^'?(\w+)")
_ARGUMENT = re.compile(r"'(\w+)'")


def named(
    endpoint: Endpoint, body: Mapping[str, Any], message: str, param: str | None
) -> tuple[str, str | None]:
    """The message and the field of an error, with the names that the client has sent."""
    message = _PYTHON.sub("", message)
    if param is None:
        return message, _mentioned(body, message)
    names = BODY_FIELDS[endpoint]
    mine: tuple[str | None, ...] = ()
    if param in ("max_tokens", "max_completion_tokens") and param not in body:
        mine = names.max_tokens
    elif param == "logprobs":
        mine = (names.logprobs,)
    for name in mine:
        if name is not None and name != param and body.get(name) is not None:
            return re.sub(rf"\b{param}\b", name, message), name
    return message, param


def _mentioned(body: Mapping[str, Any], message: str) -> str | None:
    """The field that a message begins with, has in backticks, or has as words."""
    for quoted, first in _QUOTED.findall(message):
        name: str = quoted or first
        if name in body:
            return name
    words = message.lower()
    told = (name for name in body if "_" in name and name.replace("_", " ") in words)
    return next(told, None)


def inner_field(body: Mapping[str, Any], message: str) -> str | None:
    """The field inside of an object of a body that Python's message about an argument names.

    The members of some objects become arguments of functions, such as those of
    `chat_template_kwargs`.
    """
    names = _ARGUMENT.findall(message)
    for field, value in body.items():
        for name in names:
            if isinstance(value, Mapping) and name in value:
                return f"{field}.{name}"
    return None
