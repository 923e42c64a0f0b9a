"""The arguments of tools whose schema is not enforced: a JSON object.

vLLM and xgrammar allow any JSON there, and a small model writes a text. OpenAI's API calls a tool
without `parameters` one that has none, so its arguments are an empty object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OBJECT = {"type": "object"}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}

Parameters = dict[str, Any] | bool


def of_function(stock: Callable[[Any], Parameters]) -> Callable[[Any], Parameters]:
    """Replaces a function that returns the schema of a tool's arguments.

    stock: returns true for any JSON.
    """

    def parameters(function: Any) -> Parameters:
        schema = stock(function)
        if schema is not True or not hasattr(function, "strict"):  # tools that models bring along
            return schema
        return EMPTY if not getattr(function, "parameters", None) else OBJECT

    return parameters
