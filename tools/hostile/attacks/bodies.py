"""Attacks by the size of requests or of their answers: findings 1, 6, 8 and 9."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tools.hostile.attempt import Attempt, Reply, attack, json_bytes

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MB = 10**6
MAX_BODY_BYTES = 8 * 2**20
"""`max_body_bytes` of configs/stories.yaml. It is the default."""

LONG_S = 60.0
WORDS = "the little dog went to the sea "


def text_of(num_bytes: int) -> str:
    return (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]


def filled(body: Mapping[str, Any], name: str, size: int = MAX_BODY_BYTES - 64) -> bytes:
    """Return `body` as JSON of `size` bytes, with a long text as `name`."""
    empty = len(json_bytes({**body, name: ""}))
    return json_bytes({**body, name: text_of(size - empty)})


@attack(1, bounded=True)
async def heavy_bodies(attempt: Attempt) -> None:
    """Send embeddings of 800 and of 2,048 inputs. They must be answered.

    Then send texts of 4.2 MB and of almost max_body_bytes in several fields, one after another.
    Each must be answered or refused with 400.
    """
    encoder = {"model": attempt.encoder}
    for num in (800, 2048):
        texts = [f"A dog {number}." for number in range(num)]
        await attempt.expect(
            f"{num} inputs", EMBEDDINGS, encoder | {"input": texts}, 200, limit_s=LONG_S
        )
    sizes = (("4.2 MB", 4_200_000), ("max_body_bytes", MAX_BODY_BYTES - 64))
    for name, size in sizes:
        await attempt.expect(
            f"prompt of {name}", COMPLETIONS, filled({}, "prompt", size), 200, 400, limit_s=LONG_S
        )
        negative = filled({"prompt": "Once", "guidance_scale": 2}, "negative_prompt", size)
        await attempt.expect(f"negative of {name}", COMPLETIONS, negative, 400, limit_s=LONG_S)
        await attempt.expect(
            f"text of {name}", EMBEDDINGS, filled(encoder, "input", size), 400, limit_s=LONG_S
        )
    for model in (attempt.model, attempt.encoder):
        body = filled({"model": model}, "prompt", 3_900_000)
        await attempt.expect(
            f"/tokenize of 3.9 MB, {model}", "/tokenize", body, 200, 400, limit_s=LONG_S
        )


@attack(1, limit_s=150)
async def heavy_answers(attempt: Attempt) -> None:
    """Request the largest answer of each kind, one after another.

    These are 16,000 tokens with 20 logprobs each, 2,048 documents with their texts, the strings of
    500,000 tokens, and the text of 400,000 tokens. Each must be answered, or be refused with 400
    before any work is done.
    """
    body = {"prompt": "Once", "n": 40, "max_tokens": 400, "logprobs": 20, "ignore_eos": True}
    await attempt.expect("n=40 with logprobs", COMPLETIONS, body, 200, 400, limit_s=120)
    documents = [f"The dog {number}. {text_of(1000)}" for number in range(2048)]
    rerank = {
        "model": attempt.encoder,
        "query": "a dog",
        "documents": documents,
        "return_documents": True,
    }
    await attempt.expect(
        "2,048 documents back",
        "/rerank",
        rerank | {"truncate_prompt_tokens": 8},
        200,
        limit_s=LONG_S,
    )
    strings = {"prompt": "a " * 250_000, "return_token_strs": True}
    await attempt.expect("token strings", "/tokenize", strings, 200, 400, limit_s=LONG_S)
    await attempt.expect(
        "detokenize", "/detokenize", {"tokens": [300] * 400_000}, 200, 400, limit_s=LONG_S
    )


@attack(6)
async def many_streams(attempt: Attempt) -> None:
    """Send `n: 10000`, a list of 5,000 prompts, and `n: 128`, guided and plain.

    Each must be refused with 400, or be served without a delay for other clients.
    """
    work = {"max_tokens": 200, "ignore_eos": True}
    shapes: list[dict[str, Any]] = [
        {"prompt": "Once", "n": 10_000},
        {"prompt": ["Once"] * 5000},
        {"prompt": "Once", "n": 128},
    ]
    shapes += [{"prompt": "Once", "n": 128, "guidance_scale": 2}, {"prompt": [[5]] * 200, "n": 50}]
    for shape in shapes:
        await attempt.send(COMPLETIONS, work | shape, limit_s=15)
    await attempt.together(
        4, lambda _: attempt.send(COMPLETIONS, work | {"prompt": "Once", "n": 64}, limit_s=15)
    )


@attack(8, bounded=True)
async def field_names(attempt: Attempt) -> None:
    """Send 200,000 unknown field names, made of the letters of known names, to several routes.

    Each request must be refused with 400, or answered, without delay.
    """
    names = near_names(200_000)
    fields = ",".join(f'"{name}":1' for name in names)
    for path, start in (
        (COMPLETIONS, '"prompt":"x"'),
        (EMBEDDINGS, '"input":"x"'),
        ("/tokenize", '"prompt":"x"'),
    ):
        await attempt.expect(
            f"{path}, 200,000 names", path, f"{{{start},{fields}}}".encode(), 200, 400
        )
    inner = f'{{"prompt":"x","vllm_xargs":{{{fields}}}}}'.encode()
    await attempt.expect("200,000 names in vllm_xargs", COMPLETIONS, inner, 200, 400)
    many = dict.fromkeys(names[:500], 1)
    await attempt.together(
        40, lambda _: attempt.send(COMPLETIONS, {"prompt": "x", "max_tokens": 1} | many)
    )


def near_names(num: int) -> list[str]:
    """Return different names, each with the letters of a known field name in another order.

    difflib needs the most time to compare such names.
    """
    rng, names = random.Random(0), dict.fromkeys([""])
    known = ("logits_processors", "negative_prompt", "negative_messages", "cfg_scale_guidance")
    while len(names) <= num:
        letters = [*rng.choice(known)]
        rng.shuffle(letters)
        names["".join(letters)] = None
    return [*names][1:]


@attack(9)
async def tokenizing(attempt: Attempt) -> None:
    """Send six /tokenize of 2 MB at once, to the generator and to the encoder.

    Then send four embeddings, four chats and four negative prompts of 2 MB. All must be answered or
    refused, while other clients are served.
    """
    for model in (attempt.model, attempt.encoder):
        body = filled({"model": model}, "prompt", 2 * MB)

        async def tokenize(_: int, body: bytes = body) -> Reply:
            return await attempt.expect("2 MB", "/tokenize", body, 200, 400, 429)

        await attempt.together(6, tokenize)
    body = filled({"model": attempt.encoder, "truncate_prompt_tokens": -1}, "input", 2 * MB)
    await attempt.together(
        4, lambda _: attempt.expect("2 MB, truncated", EMBEDDINGS, body, 200, 400, 429)
    )
    chat = {"messages": [{"role": "user", "content": text_of(2 * MB)}]}
    await attempt.together(4, lambda _: attempt.expect("chat of 2 MB", CHAT, chat, 400, 429))
    negative = filled({"prompt": "x", "guidance_scale": 2}, "negative_prompt", 2 * MB)
    await attempt.together(
        4, lambda _: attempt.expect("negative of 2 MB", COMPLETIONS, negative, 400, 429)
    )


@attack(0)
async def floods(attempt: Attempt) -> None:
    """Send 40 malformed bodies, small ones and of 1 MB, from each of 50 concurrent clients.

    Each must be refused with 400 or 429.
    """
    shapes = [
        b"{not json",
        b"[]",
        b"{}",
        b'{"prompt": ' + b"[" * 500,
        b"\xff" * 1000,
        b'{"a":' * 900,
    ]
    shapes += [b'{"prompt": "' + b"x" * MB, b"[" + b"1," * (MB // 2) + b"1]"]
    rng = random.Random(0)

    async def flood(_: int) -> None:
        for _ in range(40):
            path = rng.choice([COMPLETIONS, CHAT, EMBEDDINGS, "/tokenize"])
            await attempt.expect("malformed", path, rng.choice(shapes), 400, 429)

    await attempt.together(50, flood)
