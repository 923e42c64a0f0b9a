"""Attacks by the heads of requests, and by web pages of strangers: issue 43."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from tools.hostile.attacks.bodies import COMPLETIONS
from tools.hostile.attempt import Attempt, attack, in_error_shape, json_bytes
from tools.hostile.wire import RawAnswer, exchange, head

FLOOD_S = 12.0
RAW_LIMIT_S = 20.0
MANY = 40_000_000
"""Bytes of a head that is too large."""

ASK = json_bytes({"prompt": "Once", "max_tokens": 4})
EVIL = "http://evil.example"


def large_heads(attempt: Attempt) -> dict[str, bytes]:
    """Return heads and trailers of MANY bytes, without their ends."""
    start = head("POST", COMPLETIONS, {"Host": attempt.authority} | dict(attempt.headers))[:-2]
    chunked = start + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    return {
        "short lines": start + b"a:\r\n" * (MANY // 4),
        "one line": start + b"a: " + b"x" * MANY,
        "a path": b"GET /" + b"x" * MANY,
        "short trailers": chunked + b"0\r\n" + b"a:\r\n" * (MANY // 4),
        "one trailer": chunked + b"0\r\na: " + b"x" * MANY,
        "a chunk's extension": chunked + b"1;" + b"x" * MANY,
        "pipelined requests": (start + b"\r\n") * (MANY // (len(start) + 2)),
    }


@attack(43, limit_s=120)
async def heads_of_40_mb(attempt: Attempt) -> None:
    """Send 40 MB of short header lines on two connections for 12 s, and each other large head once.

    Each must get 431, or its connection must end. Memory must not grow, and others must be served.
    """
    heads = large_heads(attempt)
    until = time.monotonic() + FLOOD_S

    async def flood(_: int) -> None:
        while time.monotonic() < until:
            _expect_end(attempt, "short lines", await _told(attempt, heads["short lines"]))

    await attempt.together(2, flood)
    for name, sent in heads.items():
        _expect_end(attempt, name, await _told(attempt, sent))


async def _told(attempt: Attempt, sent: bytes) -> RawAnswer:
    return await exchange(attempt.host, attempt.port, sent, RAW_LIMIT_S)


def _expect_end(attempt: Attempt, name: str, answer: RawAnswer) -> None:
    attempt.told[answer.kind] += 1
    if answer.status not in (0, 431) or answer.ending == "silent":
        attempt.fault(f"{name}: {answer.kind}, {answer.ending}")


@attack(43)
async def heads_that_never_end(attempt: Attempt) -> None:
    """Send a head byte by byte, nothing, and empty lines, on ten connections each.

    The server must end each within 15 s.
    """
    start = head("POST", COMPLETIONS, {"Host": attempt.authority} | dict(attempt.headers))[:-2]
    for_ever = {"a head": (start + b"a: ", b"x"), "nothing": (b"", b""), "lines": (b"", b"\r\n")}
    await asyncio.gather(
        *(_drip(attempt, name, *sent) for name, sent in for_ever.items() for _ in range(10))
    )


async def _drip(attempt: Attempt, name: str, first: bytes, more: bytes) -> None:
    """Send `first`, and `more` once a second, until the server ends the connection."""
    reader, writer = await asyncio.open_connection(attempt.host, attempt.port)
    ended = asyncio.ensure_future(reader.read(1))
    try:
        writer.write(first)
        for _ in range(15):
            writer.write(more)
            if (await asyncio.wait([ended], timeout=1))[0]:
                attempt.told["ended by the server"] += 1
                return
        attempt.fault(f"{name}: still open after 15 s")
    finally:
        ended.cancel()
        writer.close()


ODD = (b"\xff", b"\xc3", b"a\xed\xa0\x80", b"\xfe\xff")
NAMES = (
    "x-request-id",
    "x-session-id",
    "x_session_id",
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "traceparent",
    "tracestate",
    "content-type",
    "origin",
    "host",
    "expect",
    "cookie",
    "authorization",
    "x-api-key",
    "user-agent",
)


@attack(43, bounded=True)
async def odd_bytes(attempt: Attempt) -> None:
    """Send bytes that are not UTF-8 in each header, in the path and in the query.

    Each must get an error below 500 in OpenAI's shape, or be served. /health and /ready, which
    others ask at the same time, must be 200.
    """
    for name, sent in _odd_requests(attempt):
        answer = await exchange(attempt.host, attempt.port, sent, RAW_LIMIT_S)
        attempt.told[answer.kind] += 1
        text = answer.body.decode("utf-8", "replace")
        if answer.status >= 500 or not answer.status:
            attempt.fault(f"{name}: {answer.kind}")
        elif answer.status >= 400 and not in_error_shape(text):
            attempt.fault(f"{name}: {answer.status} is not in OpenAI's shape: {text[:60]!r}")
        if name.startswith(("/health", "/ready")) and answer.status != 200:
            attempt.fault(f"{name}: {answer.kind}, not 200")


def _odd_requests(attempt: Attempt) -> Iterator[tuple[str, bytes]]:
    """Yield requests, by what is odd."""
    usual = {"Host": attempt.authority} | dict(attempt.headers)
    post = usual | {"Content-Type": "application/json", "Content-Length": str(len(ASK))}
    for name in NAMES:
        for odd in ODD:
            line = name.encode() + b": " + odd + b"\r\n"
            yield f"{name}: {odd!r}", head("POST", COMPLETIONS, post)[:-2] + line + b"\r\n" + ASK
    for path in ("/health", "/ready", "/v1/models"):
        line = b"x-request-id: \xff\r\nserve_multiplexed_model_id: \xff\r\n"
        yield path, head("GET", path, usual)[:-2] + line + b"\r\n"
    for odd in (b"/\xff", b"/%ff", b"/%00", b"/v1/models?a=\xff", b"/v1/models?%ff=%00", b"//a"):
        yield str(odd), head("GET", "/", usual).replace(b"GET /", b"GET " + odd, 1)


@attack(43, bounded=True)
async def pages_of_strangers(attempt: Attempt) -> None:
    """Call the server as a browser does for a stranger's page, and by a stranger's name.

    Without keys, nothing may be run or read: 403, 415 or 421, and no header that lets a page read.
    """
    if attempt.keys:
        attempt.told["not played: this server has keys"] += 1
        return
    json, text = {"content-type": "application/json"}, {"content-type": "text/plain"}
    asked = {"access-control-request-method": "POST"}
    for what, method, headers, statuses in (
        ("a foreign origin", "POST", json | {"origin": EVIL}, {403}),
        ("a sandboxed page", "POST", json | {"origin": "null"}, {403}),
        ("a form", "POST", text | {"origin": EVIL}, {403}),
        ("text", "POST", text, {415}),
        ("a form's type", "POST", {"content-type": "application/x-www-form-urlencoded"}, {415}),
        ("multipart", "POST", {"content-type": "multipart/form-data; boundary=x"}, {415}),
        ("a preflight", "OPTIONS", asked | {"origin": EVIL}, {403}),
        ("a foreign name", "POST", json | {"host": "evil.example"}, {421}),
        ("a rebound page", "POST", json | {"host": "evil.example", "origin": EVIL}, {421}),
        ("an ill-formed name", "POST", json | {"host": "["}, {400}),
    ):
        body = ASK if method == "POST" else b""
        sent = {"Host": attempt.authority, "Content-Length": str(len(body))}
        lines = head(method, COMPLETIONS, sent | _titled(headers) | dict(attempt.headers))
        answer = await exchange(attempt.host, attempt.port, lines + body, RAW_LIMIT_S)
        attempt.told[answer.kind] += 1
        if answer.status not in statuses:
            attempt.fault(f"{what}: {answer.kind}, not {statuses}")
        if "access-control-allow-origin" in answer.headers.lower():
            attempt.fault(f"{what}: a page may read the answer")
    for path in ("/docs", "/playground", "/playground/encoders", "/v1/models"):
        answer = await exchange(
            attempt.host, attempt.port, head("GET", path, {"Host": attempt.authority}), RAW_LIMIT_S
        )
        if "frame-ancestors 'none'" not in answer.headers:
            attempt.fault(f"{path} can be framed")


def _titled(headers: dict[str, str]) -> dict[str, str]:
    return {name.title(): value for name, value in headers.items()}
