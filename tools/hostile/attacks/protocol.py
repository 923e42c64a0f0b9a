"""Attacks by unusual or invalid HTTP, and a router that is killed: finding 12 and similar cases."""

from __future__ import annotations

import asyncio
import gzip
import re
import time

import httpx

from tools.hostile.attacks.bodies import CHAT, COMPLETIONS, EMBEDDINGS, MAX_BODY_BYTES, text_of
from tools.hostile.attempt import Attempt, attack, in_error_shape, json_bytes
from tools.hostile.wire import exchange, head

ASK = {"prompt": "Once", "max_tokens": 4}
ROUTER = "ServeReplica:cfg:CfgRouter"
RAW_LIMIT_S = 20.0


def raw_post(
    attempt: Attempt, body: bytes, version: str = "1.1", path: str = COMPLETIONS, **more: str
) -> bytes:
    """Return a whole request as bytes.

    more: headers, with underscores for dashes.
    """
    headers = {
        "Host": attempt.authority,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    headers |= dict(attempt.headers) | {
        name.replace("_", "-"): value for name, value in more.items()
    }
    return head("POST", path, headers, version) + body


@attack(12, bounded=True)
async def too_large(attempt: Attempt) -> None:
    """Send bodies of slightly more than 8 MiB and of 40 MB, with and without a declared length.

    They are sent by httpx, and by a socket that sends the whole body. Each must get 413.
    """
    for size in (MAX_BODY_BYTES + 100, 40_000_000):
        body = json_bytes({"prompt": text_of(size)})
        await _by_httpx(attempt, body, size)
        for pause_s in (0.0, 0.02):
            answer = await exchange(
                attempt.host, attempt.port, raw_post(attempt, body), RAW_LIMIT_S, pause_s
            )
            _expect_413(attempt, f"socket, pauses of {pause_s} s, {size}", answer.kind)
        headers = {
            "Host": attempt.authority,
            "Content-Type": "application/json",
            "Transfer-Encoding": "chunked",
        } | dict(attempt.headers)
        sent = head("POST", COMPLETIONS, headers) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answer = await exchange(attempt.host, attempt.port, sent, RAW_LIMIT_S)
        _expect_413(attempt, f"chunked, {size}", answer.kind)


async def _by_httpx(attempt: Attempt, body: bytes, size: int) -> None:
    async with httpx.AsyncClient(
        base_url=attempt.url, timeout=RAW_LIMIT_S, headers=attempt.headers
    ) as client:
        try:
            kind = str((await client.post(COMPLETIONS, content=body)).status_code)
        except httpx.HTTPError as error:
            kind = type(error).__name__
    _expect_413(attempt, f"httpx, {size}", kind)


def _expect_413(attempt: Attempt, what: str, kind: str) -> None:
    attempt.told[kind] += 1
    if kind != "413":
        attempt.fault(f"{what} bytes: {kind}, not 413")


@attack(12, bounded=True)
async def http_1_0(attempt: Attempt) -> None:
    """Send requests by HTTP/1.0, streamed and not.

    The answer must not have `transfer-encoding: chunked`, which HTTP/1.0 does not know.
    """
    for stream in (False, True):
        sent = raw_post(attempt, json_bytes(ASK | {"stream": stream}), version="1.0")
        answer = await exchange(attempt.host, attempt.port, sent, RAW_LIMIT_S)
        attempt.told[answer.kind] += 1
        if answer.status not in (200, 505, 426):
            attempt.fault(f"HTTP/1.0: {answer.kind}")
        if "transfer-encoding: chunked" in answer.headers.lower():
            attempt.fault(f"HTTP/1.0, {'streamed' if stream else 'whole'}: chunked")


@attack(12, bounded=True)
async def model_paths(attempt: Attempt) -> None:
    """Read /v1/models. It must not show the path of a directory."""
    reply = await attempt.expect("/v1/models", "/v1/models", None, 200, method="GET")
    if found := re.findall(
        r'"(/[\w.-]+/[^"]*|[^"]*/site-packages/[^"]*)"',
        re.sub(r'"endpoints":\[.*?\]', "", reply.text),
    ):
        attempt.fault(f"/v1/models shows {found[0]}")


@attack(12, breaks=True)
async def router_killed(attempt: Attempt) -> None:
    """Kill the CfgRouter process while it has requests.

    Their errors must have the shape of OpenAI's errors, and must never be plain text. This needs a
    server that hostile.py has started.
    """
    if attempt.kill is None:
        attempt.told["not played: this server is not ours"] += 1
        return
    until = time.monotonic() + 30
    clients = [asyncio.ensure_future(_ask_on(attempt, until)) for _ in range(8)]
    await asyncio.sleep(2)
    attempt.told[f"killed {attempt.kill(ROUTER)} router"] += 1
    await asyncio.gather(*clients)


async def _ask_on(attempt: Attempt, until: float) -> None:
    """Send requests until `until`. An error that is not in OpenAI's shape is a fault."""
    while time.monotonic() < until:
        reply = await attempt.send(
            COMPLETIONS, ASK | {"max_tokens": 100, "ignore_eos": True}, limit_s=40, count=False
        )
        text_error = reply.status >= 400 and not in_error_shape(reply.text)
        attempt.told[
            f"{reply.status or reply.ending}{', not in the shape' if text_error else ''}"
        ] += 1
        if text_error:
            attempt.fault(f"{reply.status} as {reply.text[:40]!r}")
        await asyncio.sleep(0.1)


@attack(0, bounded=True)
async def odd_requests(attempt: Attempt) -> None:
    """Send unusual methods, wrong content types, gzip, duplicate keys and long model names.

    Each error must have the shape of OpenAI's errors.
    """
    await _methods(attempt)
    body = json_bytes(ASK)
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "x" * 4000,
    ):
        await attempt.send(COMPLETIONS, body, headers={"content-type": kind})
    zipped = gzip.compress(json_bytes({"prompt": "x" * 10**8}))
    for content in (gzip.compress(body), zipped, body):
        await attempt.send(COMPLETIONS, content, headers={"content-encoding": "gzip"})
    twice = (
        b'{"prompt": "Once", "max_tokens": 4, "max_tokens": 400, "n": 1, "n": 10000, "prompt":'
        b' ["a"]}'
    )
    await attempt.send(COMPLETIONS, twice)
    for length in (10_000, 10**6):
        for path, start in (
            (COMPLETIONS, ASK),
            (EMBEDDINGS, {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
        ):
            await attempt.expect("long model name", path, start | {"model": "m" * length}, 404, 400)


async def _methods(attempt: Attempt) -> None:
    for path in (
        COMPLETIONS,
        CHAT,
        EMBEDDINGS,
        "/tokenize",
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
        "/no-such",
    ):
        for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
            await attempt.send(path, None, method=method)


def odd_heads(attempt: Attempt) -> dict[str, bytes]:
    """Return requests that no client library sends, by a description of what is odd."""
    body = json_bytes(ASK)
    good = raw_post(attempt, body)
    host = f"Host: {attempt.authority}\r\n".encode()
    chunked = {"Host": "x", "Transfer-Encoding": "chunked"}
    return {
        "5,000 headers": raw_post(attempt, body, **{f"x-{number}": "y" for number in range(5000)}),
        "header of 60 KB": raw_post(attempt, body, x="y" * 60_000),
        "header of 1 MB": raw_post(attempt, body, x="y" * 10**6),
        "path of 1 MB": good.replace(COMPLETIONS.encode(), b"/" + b"p" * 10**6, 1),
        "unknown method": good.replace(b"POST", b"FROB", 1),
        "no request": b"\x16\x03\x01\x02\x00" * 100,
        "negative length": raw_post(attempt, body, Content_Length="-1"),
        "length of a billion": raw_post(attempt, body, Content_Length="1000000000"),
        "two lengths": good.replace(host, host + b"Content-Length: 3\r\n", 1),
        "length and chunks": good.replace(host, host + b"Transfer-Encoding: chunked\r\n", 1),
        "ill-formed chunk": head("POST", COMPLETIONS, chunked) + b"zz\r\n\r\n",
        "no host": good.replace(host, b"", 1),
        "websocket": head(
            "GET", COMPLETIONS, {"Host": "x", "Connection": "Upgrade", "Upgrade": "websocket"}
        ),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "expects 100": raw_post(attempt, body, Expect="100-continue"),
        "line ends in a header": good.replace(host, host + b"X-Request-Id: a\rb\x00c\r\n", 1),
    }


@attack(0)
async def odd_headers(attempt: Attempt) -> None:
    """Send malformed heads from sockets.

    They have 5,000 headers, a header of 1 MB, invalid lengths, two lengths, or unknown methods.
    Each must be answered below 500 or with 505, or the connection must be closed. A valid request
    after them must be answered.
    """
    for name, request in odd_heads(attempt).items():
        answer = await exchange(attempt.host, attempt.port, request, 8)
        attempt.told[answer.kind] += 1
        if answer.status >= 500 and answer.status != 505:
            attempt.fault(f"{name}: {answer.kind}")
    await attempt.expect("a good one after them", COMPLETIONS, ASK, 200)
