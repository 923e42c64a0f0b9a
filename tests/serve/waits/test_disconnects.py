"""If a client disconnects, its group leaves the engine. /ready reports what the engine holds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

import httpx
import pytest

from tools.serving.process import Json, ServeProcess

Call: TypeAlias = Callable[[httpx.AsyncClient, Json], Coroutine[Any, Any, None]]

LONG: Json = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 1.0,
}
GUIDANCE: Json = {"guidance_scale": 2.0, "negative_prompt": "A story about the sea."}
LIMIT_S = 15


@pytest.fixture
async def http(server: ServeProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        yield http


async def engine(http: httpx.AsyncClient) -> dict[str, int]:
    state: dict[str, int] = (await http.get("/ready")).raise_for_status().json()["engine"]
    return state


async def until_idle(http: httpx.AsyncClient) -> tuple[float, dict[str, int]]:
    """Wait until the engine holds no request. Return the seconds, and its state after that."""
    start = time.monotonic()
    while time.monotonic() - start < LIMIT_S:
        state = await engine(http)
        if state["running"] == state["waiting"] == state["groups"] == 0:
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - start, state


def assert_nothing_left(state: dict[str, int]) -> None:
    assert state["running"] == state["waiting"] == state["groups"] == 0, state
    assert state["free_blocks"] == state["total_blocks"], state
    assert state["leader_blocks"] == state["follower_blocks"] == 0, state


async def wait(http: httpx.AsyncClient, body: Json) -> None:
    """Send a request without streaming."""
    (await http.post("/v1/completions", json=body)).raise_for_status()


async def read(http: httpx.AsyncClient, body: Json) -> None:
    """Send a request with streaming, and read the stream to its end."""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for _ in answer.aiter_lines():
            pass


async def leave(call: asyncio.Task[None]) -> bool:
    """Disconnect. Return False if the call had already ended."""
    left = call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    return left


@pytest.mark.parametrize("call", [wait, read])
@pytest.mark.parametrize("guidance", [{}, GUIDANCE], ids=["plain", "guided"])
async def test_leaving_aborts_at_once(
    http: httpx.AsyncClient, model: str, call: Call, guidance: Json
) -> None:
    """The engine drops a request within two seconds, although hundreds of steps were left."""
    await until_idle(http)
    body = {"model": model, **LONG, "max_tokens": 480, **guidance}
    task = asyncio.create_task(call(http, body))
    async with asyncio.timeout(LIMIT_S):
        while (await engine(http))["running"] < (2 if guidance else 1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await leave(task)
    took_s, state = await until_idle(http)
    assert_nothing_left(state)
    assert took_s < 2, took_s


async def test_twenty_disconnects_at_random_moments(http: httpx.AsyncClient, model: str) -> None:
    """Ten streams and ten whole answers, all at once, leak no block and no request.

    Most of the requests are guided.
    """
    rng = random.Random(5825)

    async def visit(call: Call) -> bool:
        body = {
            "model": model,
            **LONG,
            **(GUIDANCE if rng.random() < 0.75 else {}),
            "n": rng.choice([1, 1, 2]),
        }
        task = asyncio.create_task(call(http, body))
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        return await leave(task)

    left = await asyncio.gather(*(visit(call) for call in [wait, read] * 10))
    assert sum(left) >= 15, left
    _, state = await until_idle(http)
    assert_nothing_left(state)
    answer = await http.post(
        "/v1/completions", json={"model": model, "prompt": "Once", "max_tokens": 3, **GUIDANCE}
    )
    assert answer.status_code == 200
