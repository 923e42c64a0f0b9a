"""HTTP answers made from JSON text."""

from __future__ import annotations

from fastapi.responses import Response


def json_answer(text: str) -> Response:
    """The answer with `text` as its body, as application/json."""
    return Response(text, media_type="application/json")
