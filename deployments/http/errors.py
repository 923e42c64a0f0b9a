"""Translate our errors to HTTP answers, and vLLM's HTTP statuses to our errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import (
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    CfgServeError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    ForeignOriginError,
    MediaTypeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestError,
    UnknownHostError,
    UnknownModelError,
)

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 2000, 100

_UNSAID = "The engine failed to serve this request, and did not say why: see the server's log."


@dataclass(frozen=True, kw_only=True)
class HttpError:
    """An error as the client gets it.

    body: in OpenAI's format.
    headers: Retry-After if trying again can help; WWW-Authenticate with 401, as HTTP demands.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


STATUS = (
    (AuthenticationError, 401, "authentication_error"),
    (PermissionDeniedError, 403, "permission_error"),
    (BodyTooLargeError, 413, "invalid_request_error"),
    (BodyTimeoutError, 408, "timeout_error"),
    (MediaTypeError, 415, "invalid_request_error"),
    (ForeignOriginError, 403, "permission_error"),
    (UnknownHostError, 421, "invalid_request_error"),
    (NotFoundError, 404, "NotFoundError"),
    (RequestError, 400, "BadRequestError"),
    (OverloadedError, 429, "overloaded_error"),
    (DeadlineError, 504, "timeout_error"),
    (EngineDeadError, 503, "ServiceUnavailableError"),
    (EngineError, 500, "InternalServerError"),
    (CfgServeError, 500, "InternalServerError"),
)
"""Status and type for each of our errors. The first row that matches counts.

The types are those of `vllm serve`, for errors that it has, too.
"""

_ANTHROPIC = "/v1/messages"


def http_error(error: CfgServeError, path: str = "") -> HttpError:
    """The HTTP answer for `error`, in OpenAI's format.

    path: of the request. Under /v1/messages, the answer is in Anthropic's format, too.
    """
    status, kind = next((status, kind) for cls, status, kind in STATUS if isinstance(error, cls))
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status == 504:
        # OpenAI's clients would retry. That is of no use after a deadline that the caller has set.
        headers["x-should-retry"] = "false"
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(getattr(error, "retry_after_s", 1.0))))
    body = error_body(str(error), status, kind, getattr(error, "param", None))
    if path.startswith(_ANTHROPIC):
        body["type"] = "error"
    return HttpError(status=status, body=body, headers=headers)


def error_of(status: int, message: str, param: str | None = None) -> CfgServeError:
    """Our error for a status that vLLM would have answered with."""
    if status == 404:
        return (UnknownModelError if param == "model" else NotFoundError)(message, param)
    if status in (429, 503):
        return OverloadedError(message)
    return (
        RequestError(message, param)
        if status < 500 or status == 501
        else EngineError(message or _UNSAID)
    )


def error_body(message: str, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object.

    Characters that cannot be encoded as UTF-8 are replaced. Message and parameter may quote long
    parts of the request, so both are cut to a maximum length.
    """
    text = message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
    param = param and param[:MAX_PARAM_CHARS].encode("utf-8", "replace").decode()
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}
