"""Requests of real size over HTTP, to configs/cfg.yaml with a vocabulary of 151,936."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cfg_core.reference import Formula, guided_generate, weighted_generate
from tests.real_size.at_real_size import MODEL, NUM_TOKENS, Reference, assert_same, ids
from tools.serving.process import Json

GUIDED: Json = {"guidance_scale": 1.5, "negative_prompt": "fedogos minuk"}
PROMPT = "Tofajec honi ufosi"


def complete(http: httpx.Client, **body: Any) -> Json:
    """The answer of a completion; it must be one."""
    defaults: Json = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answer = http.post("/v1/completions", json={**defaults, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def assert_all_guided(answer: Json) -> None:
    assert answer["guidance"]["guided_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("length", [20, 8_000, pytest.param(32_000, marks=pytest.mark.slow)])
def test_guided_text_is_that_of_the_reference(
    http: httpx.Client, reference: Reference, length: int
) -> None:
    prompt, negative = ids("p", length), ids("n", length)
    answer = complete(
        http,
        prompt=prompt,
        guidance_scale=1.5,
        negative_prompt_token_ids=negative,
        return_token_ids=True,
        max_tokens=6,
    )
    want = guided_generate(reference, prompt, negative, scale=1.5, max_new_tokens=6)
    reference.forget()
    assert_same(answer["choices"][0]["token_ids"], want)
    assert_all_guided(answer)
    assert answer["guidance"]["negative_prompt_tokens"] == length


def test_log_probabilities_of_all_streams(http: httpx.Client) -> None:
    answer = complete(
        http,
        prompt=PROMPT,
        logprobs=20,
        guidance_logprobs=True,
        return_tokens_as_token_ids=True,
        **GUIDED,
    )
    found = answer["choices"][0]["logprobs"]
    assert all(len(row) >= 20 for row in found["top_logprobs"])
    assert len(found["conditional_logprobs"]) == len(found["tokens"]) == NUM_TOKENS
    assert_all_guided(answer)


def test_a_bias_of_300_tokens_and_64_stop_strings(http: httpx.Client) -> None:
    bias = {str(token): 100 for token in ids("bias", 300)}
    stop = [f"no such text {i}" for i in range(64)]
    answer = complete(
        http, prompt=PROMPT, logit_bias=bias, stop=stop, return_token_ids=True, **GUIDED
    )
    assert {str(token) for token in answer["choices"][0]["token_ids"]} <= bias.keys()
    assert_all_guided(answer)


def test_64_choices(http: httpx.Client) -> None:
    answer = complete(http, prompt=PROMPT, n=64, temperature=1, max_tokens=4, **GUIDED)
    assert [choice["index"] for choice in answer["choices"]] == list(range(64))
    assert len({choice["text"] for choice in answer["choices"]}) > 32
    assert answer["usage"]["completion_tokens"] == 64 * 4
    assert_all_guided(answer)


WEIGHTS = (-0.5, 0.25, -0.25, 0.5, -0.5, 0.25, -0.25, 0.25)


@pytest.mark.slow
def test_eight_streams_of_16_000_tokens(http: httpx.Client, reference: Reference) -> None:
    prompt = ids("p", 100)
    followers = [ids(f"follower {i}", 16_000) for i in range(len(WEIGHTS))]
    streams = [{"token_ids": f, "weight": w} for f, w in zip(followers, WEIGHTS, strict=True)]
    answer = complete(
        http, prompt=prompt, guidance_streams=streams, max_tokens=4, return_token_ids=True
    )
    formula = Formula(weights=WEIGHTS)
    want = weighted_generate(reference, prompt, followers, formula, max_new_tokens=4)
    reference.forget()
    assert_same(answer["choices"][0]["token_ids"], want)
    assert answer["guidance"]["streams"] == 9
    assert_all_guided(answer)


def test_a_chat_of_400_messages(http: httpx.Client) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"Tofajec {i} honi."} for i in range(399)]
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Ufosi."}, *messages],
        "negative_prompt": "Minuk.",
        "guidance_scale": 1.5,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert_all_guided(answer.json())
