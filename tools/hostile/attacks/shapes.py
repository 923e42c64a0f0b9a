"""Attacks by the shape of bodies: long lists times choices, long conversations, deep and wide JSON.

All of them are smaller than max_body_bytes. A server refuses them before it makes anything of them.
"""

from __future__ import annotations

from typing import Any

from tools.hostile.attacks.bodies import CHAT, COMPLETIONS, EMBEDDINGS, MAX_BODY_BYTES
from tools.hostile.attempt import Attempt, attack, json_bytes, nested

RESPONSES, MESSAGES, BATCH = "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"
SCORING = "/generative_scoring"
LIMIT_S = 60.0
USER = {"role": "user", "content": "a"}

PLACES = {
    CHAT: "messages",
    f"{CHAT}/render": "messages",
    RESPONSES: "input",
    f"{RESPONSES}/render": "input",
    MESSAGES: "messages",
    f"{MESSAGES}/render": "messages",
    f"{MESSAGES}/count_tokens": "messages",
    "/tokenize": "messages",
}
"""Where the messages of each route are."""


@attack(0, bounded=True)
async def copied_lists(attempt: Attempt) -> None:
    """Send fields of up to 7 MB that each of many choices or prompts would get a copy of.

    Each must be refused with 400.
    """
    ids = list(range(300, 1800)) * 100
    fields: list[dict[str, Any]] = [
        {"allowed_token_ids": ids, "n": 256},
        {"allowed_token_ids": ids * 10, "n": 128},
        {"allowed_token_ids": ids, "prompt": ["Once"] * 200},
        {"vllm_xargs": {"x": [1] * 100_000}, "n": 256},
        {"vllm_xargs": {"x": "x" * 7_000_000}, "n": 128},
        {"request_id": "x" * 7_000_000, "n": 128},
        {"stop_token_ids": ids, "n": 64},
        {"stop": ["x" * 100_000] * 60, "n": 128},
        {"bad_words": ["a b " * 500_000], "n": 2},
        {"bad_words": ["a"] * 100, "n": 256},
        {"logit_bias": {str(number): 1 for number in range(150_000)}, "n": 8},
        {"cache_salt": "x" * 7_000_000, "n": 128},
    ]
    for extra in fields:
        body = {"prompt": "Once", "max_tokens": 1, **extra}
        await attempt.expect(str(extra)[:30], COMPLETIONS, body, 400, limit_s=LIMIT_S)


@attack(0, bounded=True)
async def long_conversations(attempt: Attempt) -> None:
    """Send 110,000 messages, parts, tool calls or faults to each route that reads conversations.

    Each must be refused with 400.
    """
    for path, field in PLACES.items():
        for name, messages in conversations(110_000):
            body = {"max_tokens": 1, field: messages}
            await attempt.expect(f"{path}: {name}", path, body, 400, limit_s=LIMIT_S)
    others: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [USER], "negative_messages": [USER] * 150_000, "guidance_scale": 2}),
        (BATCH, {"messages": [[USER]] * 100_000}),
        (BATCH, {"messages": [[USER] * 100_000] * 2}),
        (SCORING, {"query": "a", "items": ["a"] * 500_000, "label_token_ids": [300]}),
    ]
    for path, fields in others:
        await attempt.expect(path, path, {"max_tokens": 1, **fields}, 400, limit_s=LIMIT_S)


@attack(0, limit_s=300)
async def conversations_within_the_bounds(attempt: Attempt) -> None:
    """Send conversations that are as long as the server takes them, to each route.

    Each must be refused with 400, or answered, without a delay for other clients.
    """
    for path, field in PLACES.items():
        for name, messages in conversations(9_000):
            body = {"max_tokens": 1, field: messages}
            await attempt.expect(f"{path}: {name}", path, body, 200, 400, limit_s=LIMIT_S)
    negatives: list[list[Any]] = [[USER] * 9_000, [{}] * 20_000]
    for negative in negatives:
        body = {"messages": [USER], "negative_messages": negative, "guidance_scale": 2}
        await attempt.expect("negative", CHAT, {**body, "max_tokens": 1}, 400, limit_s=LIMIT_S)
    lists: list[dict[str, Any]] = [
        {"allowed_token_ids": [300] * 3_500, "n": 256},
        {"vllm_xargs": {"x": [1] * 3_500}, "n": 256},
        {"logit_bias": {str(number): 1 for number in range(300, 1_200)}, "n": 200},
        {"stop": ["x" * 4_000] * 60, "n": 128},
    ]
    for extra in lists:
        body = {"prompt": "Once", "max_tokens": 1, **extra}
        await attempt.expect(str(extra)[:30], COMPLETIONS, body, 200, 400, limit_s=LIMIT_S)


def conversations(num: int) -> list[tuple[str, list[Any]]]:
    """Return conversations with `num` messages, parts, calls or faults, each with its name."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    part = {"type": "text", "text": "a"}
    return [
        ("messages", [USER] * num),
        ("parts", [{"role": "user", "content": [part] * num}]),
        ("tool calls", [{"role": "assistant", "content": None, "tool_calls": [call] * (num // 2)}]),
        ("faults", [{}] * num),
        ("faulty parts", [{"role": "user", "content": [{"x": 1}] * num}]),
        ("calls", [{"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}] * num),
    ]


@attack(0, bounded=True)
async def deep_and_wide(attempt: Attempt) -> None:
    """Send 8 MB of nested lists, empty lists, objects, names, texts and numbers, to six routes.

    Each must be refused with 400.
    """
    size = MAX_BODY_BYTES - 200
    names = ",".join(f'"{number}":1' for number in range(600_000))
    values = {
        "nested": nested(size // 2),
        "lists": b"[" + b"[]," * (size // 3) + b"1]",
        "objects": b"[" + b"{}," * (size // 3) + b"1]",
        "texts": b"[" + b'"",' * (size // 3) + b"1]",
        "names": f"{{{names}}}".encode(),
        "pairs": b"[" + b"[1]," * (size // 4) + b"[1]]",
    }
    for path, field in (
        (COMPLETIONS, "prompt"),
        (CHAT, "messages"),
        (RESPONSES, "input"),
        (MESSAGES, "messages"),
        (EMBEDDINGS, "input"),
        ("/tokenize", "prompt"),
    ):
        for name, value in values.items():
            body = b'{"model":%s,"%s":%s}' % (json_bytes(attempt.model), field.encode(), value)
            await attempt.expect(f"{path}: {name}", path, body, 400, 404, limit_s=LIMIT_S)
