"""Attacks on encoders: texts that are joined with each input, lists of token ids, full queues."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tools.hostile.attacks.bodies import EMBEDDINGS, LONG_S, text_of
from tools.hostile.attempt import Attempt, Reply, attack

LONG = 3_900_000
AT_ONCE_S = 5.0
"""Seconds in which a request is refused whose size is known before any work."""

FULL_S = 20.0
"""Seconds for which a queue is kept full."""


async def refuse(attempt: Attempt, what: str, path: str, body: Any, field: str) -> None:
    """Demand a 400 at once that names `field`, how much there is, and what to do."""
    reply = await attempt.expect(what, path, body, 400, limit_s=LONG_S)
    if reply.status != 400:
        return
    error = reply.json()["error"]
    if error["param"] != field:
        attempt.fault(f"{what}: names {error['param']}, not {field}")
    if not any(hint in error["message"] for hint in ("shorten", "send")):
        attempt.fault(f"{what}: does not say what to do")
    if reply.seconds > AT_ONCE_S:
        attempt.fault(f"{what}: refused after {reply.seconds:.0f} s")


@attack(0, bounded=True)
async def encoder_prompts(attempt: Attempt) -> None:
    """Send a prompt of 3.9 million characters with 50 inputs, to /v1/embeddings and /pooling.

    It must be refused at once, with 400 that names the prompt.
    """
    model: dict[str, Any] = {"model": attempt.encoder}
    prompted = model | {"prompt": "p" * LONG, "input": ["a"] * 50}
    for path in (EMBEDDINGS, "/pooling"):
        await refuse(attempt, f"{path}, prompt", path, prompted, "prompt")


@attack(0)
async def encoder_long_texts(attempt: Attempt) -> None:
    """Send prompts of 100,000 characters with 100 inputs, a long query, and long texts as pairs.

    Each must be answered, or refused with 400 or 429.
    """
    model: dict[str, Any] = {"model": attempt.encoder}
    many = {"input": [f"text {number}" for number in range(100)]}
    for prompt in ("p" * 100_000, text_of(100_000)):
        body = model | many | {"prompt": prompt, "truncate_prompt_tokens": -1}
        await attempt.expect("100 prompts", EMBEDDINGS, body, 200, 400, limit_s=LONG_S)
    documents = {"documents": [f"document {number}" for number in range(500)]}
    body = model | documents | {"query": text_of(LONG), "truncate_prompt_tokens": 16}
    await attempt.expect("long query", "/rerank", body, 200, 400, 429, limit_s=LONG_S)
    texts = {"text_1": [text_of(2000)] * 2000, "text_2": [text_of(2000)] * 2000}
    await attempt.expect("2,000 pairs", "/score", model | texts, 400, 429, limit_s=LONG_S)


@attack(0, bounded=True)
async def token_id_lists(attempt: Attempt) -> None:
    """Send lists with more token ids than a request may have, in several forms.

    Each must be refused with 400, and at once if the request has too many tokens.
    """
    model = {"model": attempt.encoder}
    for path in (EMBEDDINGS, "/pooling"):
        body = model | {"input": [[1000] * 250] * 2048}
        await refuse(attempt, f"{path}, 512,000 tokens", path, body, "input")
    await refuse(attempt, "one list", EMBEDDINGS, model | {"input": [7] * 1_500_000}, "input")
    wrong = [[1000] * 1_000_000 + [-1], [[1000] * 500] * 1500 + [[1000, 10**9]]]
    for ids in (*wrong, [[[1]]] * 2000, [1, "a"] * 500_000):
        await attempt.expect("wrong ids", EMBEDDINGS, model | {"input": ids}, 400, limit_s=LONG_S)
    await attempt.expect(
        "ids of /detokenize", "/detokenize", model | {"tokens": [5] * 2_000_000}, 400
    )


@attack(0, limit_s=120)
async def full_encoder(attempt: Attempt) -> None:
    """Keep an encoder full for 20 s: 24 clients of one address send requests of 250,000 tokens.

    Twelve send token ids, and twelve send texts of which most is cut off. Each must be answered, or
    refused with 429. Then all leave.
    """
    model = {"model": attempt.encoder}
    ids = model | {"input": [[1000] * 250] * 1000}
    texts = model | {"input": [text_of(4000)] * 1500, "truncate_prompt_tokens": -1}
    end = time.monotonic() + FULL_S

    async def fill(number: int) -> None:
        while (left_s := end - time.monotonic()) > 0:
            reply = await attempt.send(
                EMBEDDINGS, ids if number % 2 else texts, limit_s=max(0.1, left_s), count=False
            )
            attempt.told["left" if not reply.status else reply.kind] += 1
            if reply.status not in (0, 200, 429):
                attempt.fault(f"a full queue: {reply.kind}: {reply.text[:80]}")
            await asyncio.sleep(0.2)

    await attempt.together(24, fill)


@attack(0)
async def many_texts_to_tokenize(attempt: Attempt) -> None:
    """Send 16 /tokenize of 3.9 MB and 16 embeddings of 3.9 MB to the encoder, all at once.

    Each must be answered, or refused with 400 or 429.
    """
    model = {"model": attempt.encoder}
    tokenize = model | {"prompt": text_of(LONG)}
    embed = model | {"input": text_of(LONG), "truncate_prompt_tokens": -1}

    async def send(number: int) -> Reply:
        path, body = ("/tokenize", tokenize) if number % 2 else (EMBEDDINGS, embed)
        return await attempt.expect("3.9 MB", path, body, 200, 400, 429, limit_s=LONG_S)

    await attempt.together(32, send)


@attack(0)
async def many_small_embeddings(attempt: Attempt) -> None:
    """Send 4,000 embeddings of one short text each from 400 clients of one address.

    Each must be answered, or refused with 429.
    """
    body = {"model": attempt.encoder, "input": "A dog."}

    async def send(_: int) -> None:
        for _ in range(10):
            await attempt.expect("a short text", EMBEDDINGS, body, 200, 429, limit_s=LONG_S)

    await attempt.together(400, send)
