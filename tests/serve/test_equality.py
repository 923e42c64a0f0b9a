"""Greedy tokens over HTTP equal those of the reference loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from serve_process import REPOSITORY, Json
from transformers import AutoModelForCausalLM

from cfg_core.reference import CausalLM, guided_generate

PROMPT = "Once upon a time there was a"
NEGATIVES = [None, "A story about the sea.", "No. " * 30]
SCALES = [-1.0, 0.0, 0.5, 1.5, 3.0, 7.5]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def oracle(model: str) -> Iterator[CausalLM]:
    """Load the served model in transformers, in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a small model, beside a server that uses the other cores
    yield AutoModelForCausalLM.from_pretrained(
        REPOSITORY / "models" / model, dtype=torch.float32
    ).eval()
    torch.set_num_threads(threads)


def token_ids(http: httpx.Client, **body: Any) -> list[int]:
    ids: list[int] = http.post("/tokenize", json=body).json()["tokens"]
    return ids


@pytest.mark.parametrize("negative", NEGATIVES, ids=["last-token", "short", "long"])
@pytest.mark.parametrize("scale", SCALES)
def test_http_gives_the_tokens_of_the_reference(
    client: openai.OpenAI,
    http: httpx.Client,
    model: str,
    oracle: CausalLM,
    scale: float,
    negative: str | None,
) -> None:
    extra: Json = {"guidance_scale": scale, "return_token_ids": True, "ignore_eos": True}
    extra |= {} if negative is None else {"negative_prompt": negative}
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, extra_body=extra
    )
    expected = guided_generate(
        oracle,
        token_ids(http, model=model, prompt=PROMPT),
        None if negative is None else token_ids(http, model=model, prompt=negative),
        scale=scale,
        max_new_tokens=NUM_TOKENS,
    )
    # After a tie, the tokens may differ.
    same = next((i for i, gap in enumerate(expected.gaps) if gap < 1e-4), NUM_TOKENS)
    choice: Any = answer.choices[0]  # token_ids is not a field of the client's type
    assert choice.token_ids[:same] == expected.token_ids[:same]
    assert same > NUM_TOKENS // 2
