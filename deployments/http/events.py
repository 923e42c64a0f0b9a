"""Server-sent events, as this server words them itself."""

from __future__ import annotations

import json

from cfg_core.errors import CfgServeError
from deployments.http.errors import http_error

DONE = "data: [DONE]\n\n"
"""The last event of a stream that is complete."""


def error_event(error: CfgServeError) -> str:
    """How a stream ends when the engine fails after the first byte; no `[DONE]` follows."""
    return f"event: error\ndata: {json.dumps(http_error(error).body)}\n\n"
