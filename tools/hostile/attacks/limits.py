"""Attacks on the limits of a key: finding 4.

They request the same work in many ways, and check what the key is charged. They need a server with
keys.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

from tools.hostile.attacks.bodies import CHAT, COMPLETIONS, EMBEDDINGS
from tools.hostile.attempt import Attempt, attack
from tools.hostile.server import LIMITED_TOKENS, bearer

CLOSE = 0.02
"""Largest relative difference between a charge and the engine's work."""
CHARGED = re.compile(
    r'^cfg_serve_charged_tokens_total\{[^}]*tenant="attacker"[^}]*\} (\S+)$', re.MULTILINE
)
SETTLED_S = 3.0
SHORT_S = 15.0

USER = [{"role": "user", "content": "Tell me a story about the sea."}]
TOKENS = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
GUIDED: dict[str, Any] = {"guidance_scale": 2, "negative_prompt": "A story about the farm."}
GUIDANCES: tuple[dict[str, Any], ...] = ({}, GUIDED, {"guidance_scale": 1.5})
NUMBERS = ("3", 3.0, "3.0", True, [3], None, " 3 ", "3_0", 3)
"""Spellings of a number. vLLM reads some of them as 3."""

Way = tuple[str, dict[str, Any]]


def prompts() -> list[Any]:
    """Return a prompt in each form that the API accepts."""
    ids = [0, 300, 301, 302]
    return [
        "Once upon a time",
        ["Once", "Two dogs", "The sea"],
        ids,
        [ids, ids],
        [ids],
        ["Once"],
        "x " * 200,
    ]


def completions() -> Iterator[Way]:
    for prompt, guided, stream in itertools.product(prompts(), ({}, GUIDED), (False, True)):
        yield COMPLETIONS, {"prompt": prompt, **TOKENS, **guided, "stream": stream}
    for name, number, guided in itertools.product(
        ("n", "max_tokens", "min_tokens"), NUMBERS, ({}, GUIDED)
    ):
        yield COMPLETIONS, {"prompt": "Once", **TOKENS, **guided, name: number}
    for extra in odd_extras():
        yield COMPLETIONS, {"prompt": ["Once", "Two dogs"], **TOKENS, **extra}
        yield COMPLETIONS, {"prompt": "Once", **TOKENS, **GUIDED, **extra, "stream": True}


def odd_extras() -> list[dict[str, Any]]:
    """Return fields that a wrong counter might read, or that change the work."""
    return [
        {"messages": []},
        {"messages": USER},
        {"max_completion_tokens": 1},
        {"max_completion_tokens": 1, "max_tokens": 40},
        {"best_of": 3},
        {"n": 2, "best_of": 1},
        {"echo": True},
        {"logprobs": 3},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"truncate_prompt_tokens": 1},
        {"stop": ["e", "a"]},
        {"stop_token_ids": list(range(200, 2000))},
        {"use_beam_search": True, "n": 3},
        {"n": 4, "temperature": 1, "seed": 5},
        {"add_special_tokens": False},
        {"max_tokens": None},
        {
            "n": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ]


def chats() -> Iterator[Way]:
    for guided, stream in itertools.product(GUIDANCES, (False, True)):
        yield CHAT, {"messages": USER, **TOKENS, **guided, "stream": stream}
        yield CHAT, {"messages": USER * 3, **TOKENS, **guided, "stream": stream, "n": 3}
    for name, number in itertools.product(("n", "max_completion_tokens", "max_tokens"), NUMBERS):
        yield CHAT, {"messages": USER, **TOKENS, name: number}
    for extra in odd_extras()[2:]:
        yield CHAT, {"messages": USER, **TOKENS, **extra}
    yield CHAT, {"messages": USER, "prompt": "x", **TOKENS}
    yield CHAT, {"messages": USER, "prompt": ["x"] * 9, **TOKENS}
    yield CHAT, {"messages": USER, **TOKENS, "max_completion_tokens": 40, "max_tokens": 1}
    yield CHAT, {"messages": USER, **TOKENS, "guidance_scale": 2, "negative_messages": USER * 2}
    yield (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "A story"}] * 3}],
            **TOKENS,
        },
    )


def others(attempt: Attempt) -> Iterator[Way]:
    encoder = {"model": attempt.encoder}
    for prompt in ("Once upon a time", "a " * 3000):
        yield "/tokenize", {"prompt": prompt}
        yield (
            "/tokenize",
            {"prompt": prompt, "add_special_tokens": False, "return_token_strs": True},
        )
        yield "/tokenize", encoder | {"prompt": prompt}
    yield "/tokenize", {"messages": USER}
    for tokens in ([300] * 10, [300] * 3000):
        yield "/detokenize", {"tokens": tokens}
        yield "/detokenize", encoder | {"tokens": tokens}
    for text in ("A dog.", ["A dog."] * 30, [101, 102], [[101, 102]] * 9, "a dog " * 100, ""):
        yield EMBEDDINGS, encoder | {"input": text}
    yield EMBEDDINGS, encoder | {"input": "a dog " * 3000, "truncate_prompt_tokens": -1}
    yield EMBEDDINGS, encoder | {"input": "a dog", "encoding_format": "base64"}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        yield (
            path,
            encoder
            | {"query": "a dog", "documents": ["a cat", "a house of cards"] * 9, "top_n": 1},
        )
    for texts in ("a cat", ["a cat"] * 20):
        yield "/score", encoder | {"text_1": "a dog", "text_2": texts}
    yield "/pooling", encoder | {"input": ["a dog"] * 3}


def ways(attempt: Attempt) -> list[Way]:
    """Return all ways, more than 200."""
    return [*completions(), *chats(), *others(attempt)]


# --- what the engine did --------------------------------------------------------------------------


def work_of(path: str, body: dict[str, Any], text: str) -> int | None:
    """Return the tokens of all streams, as the answer reports them. None: it reports none."""
    if path == "/detokenize":
        return len(body["tokens"])
    objects = _objects(text)
    if path == "/tokenize":
        return int(objects[0]["count"])
    usage = next(
        (o["usage"] for o in reversed(objects) if isinstance(o, dict) and o.get("usage")), None
    )
    guidance = next(
        (o["guidance"] for o in reversed(objects) if isinstance(o, dict) and o.get("guidance")),
        None,
    )
    if usage is None:
        return None
    further = (
        guidance["negative_prompt_tokens"] * num_prompts(body) + guidance["guided_tokens"]
        if guidance
        else 0
    )
    if body.get("use_beam_search") is True:
        # All beams of a prompt share the step of their first token.
        further -= (body["n"] - 1) * num_prompts(body)
    return int(usage["total_tokens"]) + further


def num_prompts(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or "messages" in body or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def _objects(text: str) -> list[Any]:
    if not text.startswith("data:"):
        return [json.loads(text)]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def charged(attempt: Attempt) -> float | None:
    """Return what the key `attacker` was charged so far. None: /metrics does not report it."""
    reply = await attempt.send("/metrics", method="GET", count=False)
    found = CHARGED.findall(reply.text)
    if not found and "cfg_serve_charged_tokens" not in reply.text:
        return None
    return sum(map(float, found))


async def settled(attempt: Attempt, before: float, work: int) -> float:
    """Return what was charged since `before`.

    The charge may come shortly after the answer, so it waits until the charge is about `work`, at
    most for SETTLED_S.
    """
    deadline = time.monotonic() + SETTLED_S
    while True:
        told = (await charged(attempt) or 0.0) - before
        if abs(told - work) <= CLOSE * work or time.monotonic() > deadline:
            return told
        await asyncio.sleep(0.1)


@attack(4, keyed=True, limit_s=300)
async def charges(attempt: Attempt) -> None:
    """Request work in more than 200 ways, one after another.

    They use numbers as texts and floats, messages beside prompts, two limits, all forms of prompts,
    guidance, streams, tokenizers and encoders. Each must be refused with 400, or be charged the
    engine's work within 2 %.
    """
    for path, body in ways(attempt):
        if body.get("stream"):
            body = body | {"stream_options": {"include_usage": True}}
        before = await charged(attempt)
        if before is None:
            attempt.fault("/metrics does not report what a key was charged")
            return
        reply = await attempt.send(path, body, limit_s=SHORT_S)
        if reply.status != 200:
            if reply.status != 400:
                attempt.fault(f"{path} {str(body)[:80]}: {reply.kind}")
            continue
        work = work_of(path, body, reply.text)
        told = await settled(attempt, before, work or 0)
        close = work is not None and abs(told - work) <= CLOSE * work
        attempt.told["charged right" if close else "charged wrong"] += 1
        if not close:
            attempt.fault(f"charged {told:.0f} for {work}: {path} {str(body)[:120]}")


@attack(4, keyed=True)
async def walking_around(attempt: Attempt) -> None:
    """Request as much work as possible in 30 s, with a key of 3,000 tokens per minute.

    The requests have six forms that a wrong counter would misread. The key may get what its limit
    allows, and one request beyond it.
    """
    limited = dict(attempt.headers) | bearer("limited")
    big = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}
    tries = [big | {"n": "8"}, big | {"n": 8.0}, {**big, "prompt": ["Once"] * 8, "messages": []}]
    tries += [
        big | {"n": "4", "guidance_scale": 2},
        {**big, "max_completion_tokens": 1, "prompt": ["Once"] * 8},
    ]
    chat = {"messages": USER, "max_completion_tokens": 1, "max_tokens": 400, "ignore_eos": True}
    start, got, largest = time.monotonic(), 0, 0
    for number in itertools.count():
        if time.monotonic() - start > 30:
            break
        path, body = (CHAT, chat) if number % 6 == 5 else (COMPLETIONS, tries[number % 6])
        reply = await attempt.send(path, body, headers=limited)
        if reply.status == 200:
            work = work_of(path, body, reply.text) or 0
            got, largest = got + work, max(largest, work)
        elif reply.status == 429:
            await asyncio.sleep(1)
    allowed = LIMITED_TOKENS * (1 + (time.monotonic() - start) / 60) + largest
    attempt.told[f"tokens ({got} of {allowed:.0f} allowed)"] += got
    if got > allowed:
        attempt.fault(f"{got} tokens against {allowed:.0f}")
