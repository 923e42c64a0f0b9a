"""Many concurrent streams get fewer chunks than tokens, and the right answers.

One test checks a setting that such a server needs: the priority of its processes.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import openai
import pytest

from tools.serving.process import ServeProcess

pytestmark = pytest.mark.slow

STREAMS, TOKENS = 24, 96
FIELDS: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0,
    "logprobs": 2,
}
GUIDED: dict[str, Any] = {"extra_body": {"guidance_scale": 2.0, "ignore_eos": True}}
LIMIT_S = 120


async def read(client: openai.AsyncOpenAI, model: str) -> tuple[int, str, list[str]]:
    """Read a stream. Return its number of chunks with text, its text, and its logprobs' tokens."""
    chunks, text = 0, ""
    tokens: list[str] = []
    async for chunk in await client.completions.create(
        model=model, stream=True, **FIELDS, **GUIDED
    ):
        for choice in chunk.choices:
            chunks += bool(choice.text)
            text += choice.text
            tokens += (choice.logprobs.tokens or []) if choice.logprobs else []
    return chunks, text, tokens


async def test_many_streams_send_several_tokens_at_a_time(server: ServeProcess, model: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=LIMIT_S
    ) as client:
        whole = await client.completions.create(model=model, **FIELDS, **GUIDED)
        alone = await read(client, model)
        answers = await asyncio.gather(*(read(client, model) for _ in range(STREAMS)))
    choice = whole.choices[0]
    assert choice.logprobs
    assert alone[1:] == (choice.text, choice.logprobs.tokens)
    assert alone[0] > 0.7 * TOKENS
    assert {text for _, text, _ in answers} == {choice.text}
    assert all(tokens == choice.logprobs.tokens for *_, tokens in answers)
    chunks = sum(chunks for chunks, *_ in answers)
    assert chunks < 0.7 * STREAMS * TOKENS, "each token was sent in a chunk of its own"


def test_replicas_have_the_same_priority_as_their_neighbours(server: ServeProcess) -> None:
    """By default, Ray gives replicas niceness 15. configs/serve.env changes that."""
    if not hasattr(server, "processes"):
        pytest.skip("CFG_SERVE_URL: the server's processes are not known")
    replicas = [
        process for process in server.processes() if "ServeReplica:" in " ".join(process.cmdline())
    ]
    assert replicas
    assert {process.nice() for process in replicas} <= {max(0, os.nice(0))}
