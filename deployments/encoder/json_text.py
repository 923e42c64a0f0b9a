"""JSON text of an answer that may be many megabytes, without vllm, ray or torch."""

from __future__ import annotations

import json
from typing import Any

_PIECE = 2000
"""Values turned into text at a time.

Python's encoder lets no other thread run while it works.
"""


def json_text(value: Any) -> str:
    """`value` as JSON without spaces: the same text as `json.dumps` would give."""
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces)


def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, dict):
        _write_object(value, pieces)
    elif isinstance(value, list) and value:
        _write_list(value, pieces)
    else:
        pieces.append(_dumps(value))


def _write_object(value: dict[str, Any], pieces: list[str]) -> None:
    opening = "{"
    for name, item in value.items():
        pieces.append(f"{opening}{_dumps(name)}:")
        _write(item, pieces)
        opening = ","
    pieces.append("}" if value else "{}")


def _write_list(value: list[Any], pieces: list[str]) -> None:
    if isinstance(value[0], dict | list):
        for place, item in enumerate(value):
            pieces.append("," if place else "[")
            _write(item, pieces)
    else:
        for start in range(0, len(value), _PIECE):
            pieces.append("," if start else "[")
            pieces.append(_dumps(value[start : start + _PIECE])[1:-1])
    pieces.append("]")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
