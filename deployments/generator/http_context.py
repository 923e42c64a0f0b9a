"""What vLLM's serving classes read of an HTTP request."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers, State


class HttpContext:
    """Stands in for the `raw_request` of vLLM's serving classes.

    It has the client's headers, and `state`, where vLLM leaves what it knows of the request.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = Headers(headers)
        self.state = State()
