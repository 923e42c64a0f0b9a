"""The words of errors for values: those of JSON, which clients in any language know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def kind_of(value: object) -> str:
    """Say what a value is, such as "a string"; what JSON has no word for by its class's name."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # where an integer is wanted, "not a number" would mislead
    if isinstance(value, int):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "a list"
    return f"a value of {type(value).__name__}"
