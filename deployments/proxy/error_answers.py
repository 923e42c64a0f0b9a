"""Turn the errors of Serve's own proxy into answers in OpenAI's format.

Serve answers in plain text if there is no route or no replica. If the ingress died, it sends
nothing: uvicorn then answers with a bare 500, or cuts the stream.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Send

from cfg_core.errors import CfgServeError, EngineDeadError
from deployments.http.errors import error_body, http_error
from deployments.http.text_answers import error_event

_LOST = "The server lost this request: send it again."
_KINDS = {
    404: "NotFoundError",
    408: "timeout_error",
    429: "overloaded_error",
    503: "ServiceUnavailableError",
}


class ErrorRewriter:
    """A `send` for Serve's proxy that rewrites the errors that Serve itself made.

    All other messages pass unchanged, except that `on_start` may change the head of an answer.
    """

    def __init__(self, send: Send, on_start: Any = None) -> None:
        self._send, self._on_start = send, on_start
        self._held: Message | None = None  # the head of an error that is being rewritten
        self._text = b""
        self._began = self._ended = self._is_event_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._held is not None:
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._reword(self._held["status"])
        else:
            self._ended = not message.get("more_body", False)
            await self._send(message)

    async def complete(self) -> None:
        """End an answer that Serve left open with an error; call it when Serve is done."""
        if self._ended:
            return
        lost = EngineDeadError(_LOST)
        if not self._began:
            for message in answer_of(lost):
                await self._send(message)
        elif self._is_event_stream:
            await self._send({"type": "http.response.body", "body": error_event(lost).encode()})
        self._ended = True

    async def _start(self, message: Message) -> None:
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
        if message["status"] >= 400 and kind.startswith(b"text/plain"):
            self._held = message
            return
        self._began, self._is_event_stream = True, kind.startswith(b"text/event-stream")
        await self._send(self._on_start(message) if self._on_start else message)

    async def _reword(self, status: int) -> None:
        assert self._held is not None
        text = self._text.decode("utf-8", "replace") or "The server could not answer."
        kind = _KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
        body = error_body(text, status, kind)
        kept = [
            (name, value) for name, value in self._held["headers"] if name.lower() == b"retry-after"
        ]
        self._held = None
        for part in _json_answer(status, body, kept):
            await self(part)


def answer_of(error: CfgServeError) -> list[Message]:
    """The ASGI messages of a complete answer that tells `error`."""
    answer = http_error(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    return _json_answer(answer.status, answer.body, headers)


def _json_answer(
    status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]]
) -> list[Message]:
    raw = json.dumps(body).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    return [
        {"type": "http.response.start", "status": status, "headers": [*headers, *own]},
        {"type": "http.response.body", "body": raw},
    ]
