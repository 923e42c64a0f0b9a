"""Server-sent events that this application makes itself."""

from __future__ import annotations

import json

from cfg_core.errors import CfgServeError
from deployments.http.errors import http_error

DONE = "data: [DONE]\n\n"
"""The last event of a complete completion or chat."""

_LAST = ("event: message_stop\n", "event: response.completed\n")


def is_last(events: str) -> bool:
    """Whether a stream is complete with these events, in OpenAI's or in Anthropic's format.

    `[DONE]` may follow other events in the same text; Anthropic's last event is a text of its own.
    """
    return events.endswith(DONE) or events.startswith(_LAST)


def error_event(error: CfgServeError) -> str:
    """The last event of a stream that fails after the first byte.

    None of the events follows that end a complete stream. The `type` is what Anthropic's clients
    look for, and the `error` what OpenAI's do.
    """
    data = {"type": "error", **http_error(error).body}
    return f"event: error\ndata: {json.dumps(data)}\n\n"
