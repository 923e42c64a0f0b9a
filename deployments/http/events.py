"""Server-sent events that this application makes itself."""

from __future__ import annotations

import json

from cfg_core.errors import CfgServeError
from deployments.http.errors import http_error

DONE = "data: [DONE]\n\n"
"""The last event of a complete stream."""


def error_event(error: CfgServeError) -> str:
    """The last event of a stream that fails after the first byte; no `[DONE]` follows it."""
    return f"event: error\ndata: {json.dumps(http_error(error).body)}\n\n"
