"""Attacks by many connections, slow clients and floods of cheap requests.

Findings 5, 7 and 10.
"""

from __future__ import annotations

import asyncio
import time

from tools.hostile.attempt import Attempt, attack, json_bytes
from tools.hostile.wire import Held, exchange, head

COMPLETIONS = "/v1/completions"
NUM_CONNECTIONS = 1100
HOLD_S = 40.0
"""Longer than `body_timeout_s` (default: 30 s), after which the server gives up on a body."""
UNREAD_S = 30.0
STORY = {"prompt": "Once", "max_tokens": 490, "ignore_eos": True, "logprobs": 20, "stream": True}


def post_head(attempt: Attempt, num_bytes: int, path: str = COMPLETIONS) -> bytes:
    headers = {
        "Host": attempt.authority,
        "Content-Type": "application/json",
        "Content-Length": str(num_bytes),
    }
    return head("POST", path, headers | dict(attempt.headers))


async def hold(attempt: Attempt, first: bytes, drip: bool = False, must_end: bool = False) -> None:
    """Open NUM_CONNECTIONS connections, hold them, and count those that the server has ended.

    first: sent on each connection.
    drip: also send one byte per second on each connection.
    must_end: a connection that is still open after HOLD_S is a fault.
    """
    held = Held(attempt.host, attempt.port)
    start = time.monotonic()
    try:
        for at in range(0, NUM_CONNECTIONS, 100):
            await asyncio.gather(*(held.open(first) for _ in range(min(100, NUM_CONNECTIONS - at))))
        if drip:
            await held.drip(start + HOLD_S)
        await asyncio.sleep(max(0.0, start + HOLD_S - time.monotonic()))
        ended = held.ended()
        attempt.told["ended by the server"] += ended
        attempt.told["still open"] += len(held.sockets) - ended
        attempt.told["refused"] += held.refused
        if must_end and ended < len(held.sockets):
            attempt.fault(
                f"after {HOLD_S:.0f} s {len(held.sockets) - ended} connections are still open"
            )
    finally:
        held.close()


@attack(5)
async def bodies_unfinished(attempt: Attempt) -> None:
    """Open 1,100 connections that announce a body of 1,000 bytes, and send only one byte in 40 s.

    Other clients must be served, and the server must end the connections in time.
    """
    await hold(attempt, post_head(attempt, 1000) + b"{", must_end=True)


@attack(5)
async def bodies_dripping(attempt: Attempt) -> None:
    """Open 1,100 connections that send one byte of their body per second, for 40 s.

    Other clients must be served, and the server must end the connections in time.
    """
    await hold(attempt, post_head(attempt, 1000) + b"{", drip=True, must_end=True)


@attack(5)
async def heads_unfinished(attempt: Attempt) -> None:
    """Open 1,100 connections that send half a head.

    Other clients must be served, and the server must end the connections in time.
    """
    await hold(attempt, post_head(attempt, 1000)[:-4], must_end=True)


@attack(5)
async def silent_connections(attempt: Attempt) -> None:
    """Open 1,100 connections, and send nothing.

    Other clients must be served, and the server must end the connections in time.
    """
    await hold(attempt, b"", must_end=True)


@attack(5)
async def large_bodies_unfinished(attempt: Attempt) -> None:
    """Open 200 connections that send 1 MB of a body of 8 MB, and wait.

    Memory must stay bounded, and other clients must be served.
    """
    held = Held(attempt.host, attempt.port)
    first = post_head(attempt, 8_000_000) + b'{"prompt": "' + b"x" * 10**6
    try:
        await asyncio.gather(*(held.open(first, 20.0) for _ in range(200)))
        await asyncio.sleep(15)
        attempt.told["ended by the server"] += held.ended()
        attempt.told["refused"] += held.refused
    finally:
        held.close()


@attack(5, bounded=True)
async def requests_left(attempt: Attempt) -> None:
    """Send a whole request for 490 tokens from 300 clients that leave at once.

    The server must keep nothing of these requests.
    """
    body = json_bytes(STORY)
    for _ in range(3):
        held = Held(attempt.host, attempt.port)
        try:
            await asyncio.gather(
                *(held.open(post_head(attempt, len(body)) + body) for _ in range(100))
            )
            await asyncio.sleep(0.3)
            attempt.told["left"] += len(held.sockets)
        finally:
            held.close()


@attack(10, bounded=True)
async def ready_flood(attempt: Attempt) -> None:
    """Send 2,000 GET /ready at once without a key, twice.

    They must be answered, and other clients must be served.
    """
    for _ in range(2):
        await attempt.together(2000, lambda _: attempt.send("/ready", method="GET"))


@attack(10)
async def open_paths_flood(attempt: Attempt) -> None:
    """Send 500 GET each of /v1/models, /metrics, /health and an unknown path, all at once.

    Other clients must be served.
    """
    paths = ("/v1/models", "/metrics", "/health", "/no/such/path")
    await attempt.together(2000, lambda number: attempt.send(paths[number % 4], method="GET"))


@attack(7)
async def streams_never_read(attempt: Attempt) -> None:
    """Open 100 streams of 490 tokens with 20 logprobs, and read none of them for 30 s.

    Other clients must be served, and no engine may be reported dead.
    """
    body = json_bytes(STORY)
    held = Held(attempt.host, attempt.port, receive_bytes=4096)
    try:
        await asyncio.gather(*(held.open(post_head(attempt, len(body)) + body) for _ in range(100)))
        attempt.told["held open"] += len(held.sockets)
        await asyncio.sleep(UNREAD_S)
    finally:
        held.close()


@attack(7)
async def slow_readers(attempt: Attempt) -> None:
    """Read 30 streams at 2 KiB per second, for 20 s. Other clients must be served."""
    body = json_bytes(STORY)
    held = Held(attempt.host, attempt.port, receive_bytes=4096)
    try:
        await asyncio.gather(*(held.open(post_head(attempt, len(body)) + body) for _ in range(30)))
        for _ in range(20):
            await asyncio.sleep(1)
            for connection in held.sockets:
                try:
                    connection.recv(2048)
                except BlockingIOError:
                    attempt.told["nothing to read"] += 1
                except OSError:
                    attempt.told["reset"] += 1
    finally:
        held.close()


@attack(0, bounded=True)
async def slow_writers(attempt: Attempt) -> None:
    """Send a valid request from 20 clients, in pieces of 20 bytes every 50 ms.

    Each must be answered.
    """
    body = json_bytes({"prompt": "Once", "max_tokens": 4, "user": "x" * 400})
    sent = post_head(attempt, len(body)) + body

    async def write(_: int) -> None:
        reader, writer = await asyncio.open_connection(attempt.host, attempt.port)
        try:
            for at in range(0, len(sent), 20):
                writer.write(sent[at : at + 20])
                await asyncio.sleep(0.05)
            status = (await asyncio.wait_for(reader.read(12), 30))[-3:].decode()
        except (OSError, TimeoutError) as error:
            status = type(error).__name__
        finally:
            writer.close()
        attempt.told[status] += 1
        if status not in ("200", "429"):
            attempt.fault(f"a slow writer was told {status}")

    await attempt.together(20, write)


@attack(0, bounded=True)
async def pipelined(attempt: Attempt) -> None:
    """Send 50 requests on each of ten connections without waiting for answers.

    Each must be answered, or the connection must end. Other clients must be served.
    """
    body = json_bytes({"prompt": "Once", "max_tokens": 20, "ignore_eos": True})
    sent = (post_head(attempt, len(body)) + body) * 50

    async def pipeline(_: int) -> None:
        answer = await exchange(attempt.host, attempt.port, sent, 30)
        attempt.told[f"first: {answer.kind}"] += 1
        if answer.status >= 500:
            attempt.fault(f"pipelined: {answer.status}")

    await attempt.together(10, pipeline)
