"""Many streams at once: fewer chunks than tokens, the same answers. And the settings that keep such
a server even."""

import asyncio
import os

import openai
import pytest

pytestmark = pytest.mark.slow

STREAMS, TOKENS = 24, 96
FIELDS = {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "logprobs": 2}
GUIDED = {"extra_body": {"guidance_scale": 2.0, "ignore_eos": True}}
LIMIT_S = 120


async def read(client, model):
    """One stream: number of chunks with text, the text, and the tokens of all its logprobs."""
    chunks, text, tokens = 0, "", []
    async for chunk in await client.completions.create(
        model=model, stream=True, **FIELDS, **GUIDED
    ):
        for choice in chunk.choices:
            chunks += bool(choice.text)
            text += choice.text
            tokens += choice.logprobs.tokens if choice.logprobs else []
    return chunks, text, tokens


async def test_many_streams_send_several_tokens_at_a_time(server, model):
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=LIMIT_S
    ) as client:
        whole = await client.completions.create(model=model, **FIELDS, **GUIDED)
        alone = await read(client, model)
        answers = await asyncio.gather(*(read(client, model) for _ in range(STREAMS)))
    choice = whole.choices[0]
    assert alone[1:] == (choice.text, choice.logprobs.tokens)
    assert alone[0] > 0.7 * TOKENS
    assert {text for _, text, _ in answers} == {choice.text}
    assert all(tokens == choice.logprobs.tokens for *_, tokens in answers)
    chunks = sum(chunks for chunks, *_ in answers)
    assert chunks < 0.7 * STREAMS * TOKENS, "each token was sent on its own"


def test_replicas_have_the_same_priority_as_their_neighbours(server):
    """Ray gives them niceness 15 unless configs/serve.env says otherwise."""
    if not hasattr(server, "processes"):
        pytest.skip("CFG_SERVE_URL: the server's processes are not known")
    replicas = [
        process for process in server.processes() if "ServeReplica:" in " ".join(process.cmdline())
    ]
    assert replicas
    assert {process.nice() for process in replicas} <= {max(0, os.nice(0))}
