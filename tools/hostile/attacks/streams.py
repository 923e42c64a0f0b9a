"""Ordinary requests from many clients at once: finding 7."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress

import aiohttp

from tools.hostile.attempt import JSON_TYPE, Attempt, attack

COMPLETIONS = "/v1/completions"
PROMPTS = (
    "Once upon a time",
    "A story about the sea.",
    "The little dog",
    "In the garden",
    "One day a girl",
)
TOKENS, CLIENTS = 490, 100
FINISH_S = 150.0
"""Time for streams that have begun, after `--seconds`."""


def body_of(prompt: str) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 20,
    }


async def right_texts(attempt: Attempt) -> dict[str, str]:
    """Return the right text of each prompt. The prompts are sent one by one."""
    texts = {}
    for prompt in PROMPTS:
        reply = await attempt.send(COMPLETIONS, body_of(prompt), limit_s=60, count=False)
        texts[prompt] = reply.json()["choices"][0]["text"]
    return texts


async def read_stream(attempt: Attempt, prompt: str, right: str) -> str:
    """Read one stream. Return `right`, or what was wrong with it."""
    assert attempt.session is not None
    text, ending = "", "ended without [DONE]"
    sent = {**JSON_TYPE, **attempt.headers}
    async with attempt.session.post(
        COMPLETIONS, json=body_of(prompt) | {"stream": True}, headers=sent
    ) as answer:
        if answer.status != 200:
            return str(answer.status)
        async for raw in answer.content:
            line = raw.decode().strip()
            if line.startswith("event: error"):
                return "error event"
            if line == "data: [DONE]":
                ending = "right" if text == right else f"wrong: {text[-20:]!r}"
            elif line.startswith("data: "):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return ending


async def client(attempt: Attempt, number: int, texts: dict[str, str], until: float) -> None:
    prompt = PROMPTS[number % len(PROMPTS)]
    while time.monotonic() < until:
        try:
            ending = await read_stream(attempt, prompt, texts[prompt])
        except (aiohttp.ClientError, OSError) as error:
            ending = type(error).__name__
        attempt.told[ending] += 1
        if ending not in ("right", "429"):
            attempt.fault(f"a stream: {ending}")
        if ending != "right":
            await asyncio.sleep(1)


@attack(7, limit_s=600)
async def hundred_clients(attempt: Attempt) -> None:
    """Read streams of 490 tokens with 20 logprobs from 100 clients, for `--seconds`.

    Every stream must be right, or be refused with 429 before its first byte.
    """
    texts = await right_texts(attempt)
    until = time.monotonic() + attempt.seconds
    tasks = [
        asyncio.ensure_future(client(attempt, number, texts, until)) for number in range(CLIENTS)
    ]
    try:
        await asyncio.wait(tasks, timeout=attempt.seconds + FINISH_S)
    finally:
        for task in tasks:
            if not task.done():
                attempt.told["unfinished"] += 1
                attempt.fault(f"a stream: unfinished {FINISH_S:.0f} s after the end")
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
