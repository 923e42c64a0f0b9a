"""Fields of requests that ask for a grammar."""

from __future__ import annotations

from typing import Any

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MARK = "velvet_marmalade_seven"
"""Part of every pattern. No log may show it."""
PATTERNS = {f"p{i}": {"type": "string", "pattern": "^([a-z]{1,50}){1,50}$"} for i in range(150)}


SLOW = {f"p{i}": PATTERNS["p0"] for i in range(900)}
"""What xgrammar compiles for about a minute, so longer than a trial may take on any machine."""


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def answer(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def tag(content: Any) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": content}}


def slow_tag(properties: dict[str, Any]) -> dict[str, Any]:
    """A format that xgrammar compiles for longer than it may, and that no other compiler has."""
    schema = {"type": "object", "properties": properties, "title": MARK}
    return tag({"type": "json_schema", "any_order": True, "json_schema": schema})
