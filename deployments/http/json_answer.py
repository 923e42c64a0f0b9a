"""An HTTP answer whose JSON text is at hand."""

from __future__ import annotations

from fastapi.responses import Response


def json_answer(text: str) -> Response:
    """`text`, as application/json."""
    return Response(text, media_type="application/json")
