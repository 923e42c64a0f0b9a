"""Clients of the encoder beside others that send a minute of work, or leave."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import httpx

from tests.serve.minilm import NAME
from tools.serving.process import ServeProcess


async def until_idle(
    http: httpx.AsyncClient, name: str, limit_s: float = 20.0
) -> tuple[float, dict[str, int]]:
    """Wait until the encoder's queue is empty. Return the seconds, and its state after that."""
    start = time.monotonic()
    while True:
        answer = (await http.get("/ready")).raise_for_status()
        state: dict[str, int] = answer.json()["encoders"][name]
        took_s = time.monotonic() - start
        if not any(state.values()) or took_s > limit_s:
            return took_s, state
        await asyncio.sleep(0.05)


async def test_a_client_that_leaves_takes_its_texts_along(server: ServeProcess) -> None:
    """The queue is empty within ten seconds after the clients have left.

    Their four requests are a minute of work each.
    """
    body = {"model": NAME, "input": ["word " * 250] * 500}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        tasks = [asyncio.create_task(http.post("/v1/embeddings", json=body)) for _ in range(4)]
        async with asyncio.timeout(60):
            while (await http.get("/ready")).json()["encoders"][NAME]["queued_tokens"] < 100_000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        took_s, state = await until_idle(http, NAME)
        assert not any(state.values()), state
        assert took_s < 10, took_s
        assert (
            await http.post("/v1/embeddings", json={"model": NAME, "input": "x"})
        ).status_code == 200


def post_from(server: ServeProcess, address: str, **body: Any) -> httpx.Response:
    headers = {"X-Forwarded-For": address}
    url = f"{server.url}/v1/embeddings"
    return httpx.post(url, json={"model": NAME, **body}, headers=headers, timeout=90)


def test_a_prompt_counts_for_each_input(server: ServeProcess) -> None:
    start = time.monotonic()
    answer = post_from(server, "10.9.0.1", prompt="p" * 3_900_000, input=["a"] * 50)
    assert time.monotonic() - start < 5
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert "3900000 characters of prompt in front of each of 50 inputs make 195000050" in str(error)
    assert "one request may have 16000000: shorten the prompt" in error["message"]


def test_a_request_has_a_number_of_tokens(server: ServeProcess) -> None:
    answer = post_from(server, "10.9.0.1", input=[[1000] * 250] * 2048)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input")
    assert "512000 tokens or more, and one request may have 300000" in error["message"]


async def test_one_client_fills_the_encoder_and_another_does_not_notice(
    server: ServeProcess,
) -> None:
    """Twelve requests of 250,000 tokens are more than a minute of work each."""
    body = {"model": NAME, "input": [[1000] * 250] * 1000}
    greedy = {"X-Forwarded-For": "10.9.0.2"}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        filling = [
            asyncio.create_task(http.post("/v1/embeddings", json=body, headers=greedy))
            for _ in range(12)
        ]
        async with asyncio.timeout(60):
            while (await http.get("/ready")).json()["encoders"][NAME]["queued_tokens"] < 200_000:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for number in range(5):
            start = time.monotonic()
            answer = await asyncio.to_thread(post_from, server, "10.9.0.3", input=f"text {number}")
            assert answer.status_code == 200, answer.text
            assert time.monotonic() - start < 10, "about a quarter of a second, if all is quiet"
        refused = [task for task in filling if task.done()]
        assert {task.result().status_code for task in refused} == {429}
        assert int(refused[0].result().headers["retry-after"]) >= 1
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)
        took_s, state = await until_idle(http, NAME)
        assert not any(state.values()), state
        assert took_s < 10, took_s
