"""A client that leaves takes its group with it. The engine itself is asked what is left."""

import asyncio
import random
import time
from contextlib import suppress

import httpx
import pytest

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
GUIDANCE = {"guidance_scale": 2.0, "negative_prompt": "A story about the sea."}
LIMIT_S = 15


@pytest.fixture
async def http(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        yield http


async def engine(http) -> dict[str, int]:
    return (await http.get("/ready")).raise_for_status().json()["engine"]


async def until_idle(http) -> tuple[float, dict[str, int]]:
    """Seconds until the engine holds no request, and what it says then."""
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


async def wait(http, body):
    """A request without streaming."""
    (await http.post("/v1/completions", json=body)).raise_for_status()


async def read(http, body):
    """A stream, read to its end."""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for _ in answer.aiter_lines():
            pass


async def leave(call) -> bool:
    """Hang up. False if the call was over already."""
    left = call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    return left


@pytest.mark.parametrize("call", [wait, read])
@pytest.mark.parametrize("guidance", [{}, GUIDANCE], ids=["plain", "guided"])
async def test_leaving_aborts_at_once(http, model, call, guidance):
    """The request would have gone on for hundreds of steps; the engine forgets it within a
    moment."""
    await until_idle(http)
    task = asyncio.create_task(call(http, {"model": model, **LONG, "max_tokens": 480, **guidance}))
    async with asyncio.timeout(LIMIT_S):
        while (await engine(http))["running"] < (2 if guidance else 1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await leave(task)
    took_s, state = await until_idle(http)
    assert_nothing_left(state)
    assert took_s < 2, took_s


async def test_twenty_disconnects_at_random_moments(http, model):
    """Ten streams and ten plain waits, most of them guided, all at once: no leaked block, no
    leftover request."""
    rng = random.Random(5825)

    async def visit(call) -> bool:
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
