"""Answers that this application makes of text itself: JSON, and server-sent events."""

from __future__ import annotations

import json

from starlette.responses import Response

from cfg_core.errors import CfgServeError
from deployments.http.errors import http_error

DONE = "data: [DONE]\n\n"
"""The last event of a complete completion or chat."""

_END_OF_EVENT = "\n\n"
_LAST = (
    "event: message_stop\n",
    "event: response.completed\n",
    "event: response.incomplete\n",
)


def json_answer(text: str) -> Response:
    """The answer with `text` as its body, as application/json."""
    return Response(text, media_type="application/json")


def is_last(events: str) -> bool:
    """Whether a stream is complete with these events, in OpenAI's or in Anthropic's format.

    The last event may follow others in the same text.
    """
    start = events.rfind(_END_OF_EVENT, 0, -len(_END_OF_EVENT))
    last = events if start < 0 else events[start + len(_END_OF_EVENT) :]
    return last == DONE or last.startswith(_LAST)


def error_event(error: CfgServeError) -> str:
    """The last event of a stream that fails after the first byte.

    None of the events follows that end a complete stream. The `type` is what Anthropic's clients
    look for, and the `error` what OpenAI's do.
    """
    data = {"type": "error", **http_error(error).body}
    return f"event: error\ndata: {json.dumps(data)}\n\n"
