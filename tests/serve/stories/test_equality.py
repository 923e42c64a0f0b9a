"""Greedy tokens over HTTP equal those of the reference loop."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from cfg_core.reference import CausalLM, Formula, guided_generate, weighted_generate
from tools.serving.process import Json

PROMPT = "Once upon a time there was a"
NEGATIVES = [None, "A story about the sea.", "No. " * 30]
SCALES = [-1.0, 0.0, 0.5, 1.5, 3.0, 7.5]
NUM_TOKENS = 16


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


OTHER = "A story about a dog."
STREAMS: list[Json] = [{"weight": -1.5, "prompt": NEGATIVES[1]}, {"weight": 0.5, "prompt": OTHER}]
FORMULAS: dict[str, tuple[Json, list[str], Formula, Json]] = {
    # fields, prompts of the followers, the same for the reference, a part of the report
    "three streams": (
        {"guidance_streams": STREAMS},
        ["A story about the sea.", OTHER],
        Formula(weights=(-1.5, 0.5)),
        {"weights": [2.0, -1.5, 0.5], "streams": 3, "guided_tokens": NUM_TOKENS},
    ),
    "window": (
        {"guidance_streams": STREAMS, "guidance_start": 3, "guidance_end": 9},
        ["A story about the sea.", OTHER],
        Formula(weights=(-1.5, 0.5), start=3, end=9),
        {"weights": [2.0, -1.5, 0.5], "streams": 3, "guided_tokens": 6},
    ),
    "schedule": (
        {"guidance_schedule": [[0, 3], [5, 0.0]], "negative_prompt": OTHER},
        [OTHER],
        Formula(scales=((0, 3.0), (5, 0.0))),
        {"schedule": [[0, 3.0], [5, 0.0]], "streams": 2, "guided_tokens": NUM_TOKENS},
    ),
    "cuts": (
        {
            "guidance_scale": 4,
            "negative_prompt": OTHER,
            "guidance_top_k": 9,
            "guidance_filter_top_k": 2,
        },
        [OTHER],
        Formula(weights=(-3.0,), top_k=9, filter_top_k=2),
        {"scale": 4.0, "streams": 2, "guided_tokens": NUM_TOKENS},
    ),
    "limit": (
        {"guidance_scale": 4, "negative_prompt": OTHER, "guidance_max_kl": 0.5},
        [OTHER],
        Formula(weights=(-3.0,), max_kl=0.5),
        {"scale": 4.0, "streams": 2, "guided_tokens": NUM_TOKENS},
    ),
    "rule": (
        {"guidance_rule": {"name": "adacad", "offset": 1.0}, "negative_prompt": OTHER},
        [OTHER],
        Formula(rule={"name": "adacad", "offset": 1.0}),
        {"rule": {"name": "adacad", "offset": 1.0}, "streams": 2, "guided_tokens": NUM_TOKENS},
    ),
}
SUFFIX = " The end. It was all a dream."


@pytest.mark.parametrize("name", FORMULAS)
def test_http_gives_the_tokens_of_formulas(
    client: openai.OpenAI, http: httpx.Client, model: str, oracle: CausalLM, name: str
) -> None:
    fields, prompts, formula, report = FORMULAS[name]
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={**fields, "return_token_ids": True, "ignore_eos": True},
    )
    followers = [token_ids(http, model=model, prompt=prompt) for prompt in prompts]
    expected = weighted_generate(
        oracle,
        token_ids(http, model=model, prompt=PROMPT),
        followers,
        formula,
        max_new_tokens=NUM_TOKENS,
    )
    same = next((i for i, gap in enumerate(expected.gaps) if gap < 1e-4), NUM_TOKENS)
    choice: Any = answer.choices[0]
    assert choice.token_ids[:same] == expected.token_ids[:same]
    assert same > NUM_TOKENS // 2
    guidance: Any = answer.model_extra and answer.model_extra["guidance"]
    said = {"negative_prompt_tokens": sum(map(len, followers))}
    assert {name: guidance[name] for name in {*report, *said}} == {**report, **said}


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "token ids"])
def test_http_gives_the_tokens_of_a_negative_suffix(
    client: openai.OpenAI, http: httpx.Client, model: str, oracle: CausalLM, as_ids: bool
) -> None:
    """All choices of a stream have the reference's tokens, and the suffix is in no count."""
    suffix = token_ids(http, model=model, prompt=SUFFIX, add_special_tokens=False)
    prompt = token_ids(http, model=model, prompt=PROMPT)
    of = {"negative_suffix_token_ids": suffix} if as_ids else {"negative_suffix": SUFFIX}
    chunks = list(
        client.completions.create(
            model=model,
            prompt=[PROMPT, PROMPT],
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={**of, "guidance_scale": 2, "return_token_ids": True, "ignore_eos": True},
        )
    )
    texts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk.choices:
            shown: Any = choice
            texts[choice.index] += shown.token_ids or []
    formula = Formula(weights=(-1.0,), suffix=tuple(suffix))
    expected = weighted_generate(oracle, prompt, [], formula, max_new_tokens=NUM_TOKENS)
    same = next((i for i, gap in enumerate(expected.gaps) if gap < 1e-4), NUM_TOKENS)
    assert [text[:same] for text in texts.values()] == [expected.token_ids[:same]] * 2
    assert same > NUM_TOKENS // 2
    last: Any = chunks[-1]
    assert last.usage.prompt_tokens == 2 * len(prompt)
    assert last.usage.completion_tokens == 2 * NUM_TOKENS
    guided: Any = next(
        c.model_extra for c in chunks if c.model_extra and "guidance" in c.model_extra
    )
    assert guided["guidance"] == {
        "scale": 2.0,
        "streams": 1,
        "negative_prompt_tokens": len(suffix),
        "guided_tokens": 2 * NUM_TOKENS,
    }


def test_a_chat_is_guided_by_a_suffix(client: openai.OpenAI, model: str) -> None:
    def said(**extra: Any) -> tuple[str | None, Any]:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, **extra},
        )
        return answer.choices[0].message.content, (answer.model_extra or {}).get("guidance")

    guided, report = said(guidance_scale=4, negative_suffix=SUFFIX)
    assert report["streams"] == 1
    assert report["guided_tokens"] == NUM_TOKENS
    assert guided != said()[0]
    assert said(guidance_scale=1, negative_suffix=SUFFIX)[0] == said()[0]


def test_several_streams_in_a_stream_of_chunks_with_their_logprobs(
    client: openai.OpenAI, model: str
) -> None:
    fields = {**FORMULAS["window"][0], "guidance_logprobs": True, "ignore_eos": True}
    chunks = list(
        client.completions.create(
            model=model,
            prompt=[PROMPT, "The king"],
            n=2,
            max_tokens=NUM_TOKENS,
            temperature=0.7,
            seed=3,
            logprobs=1,
            stream=True,
            extra_body=fields,
        )
    )
    shown: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said: Any = choice.logprobs and choice.logprobs.model_extra
            tokens = len(choice.logprobs.tokens or []) if choice.logprobs else 0
            rows = (said or {}).get("negative_logprobs") or [None] * tokens
            shown.setdefault(choice.index, []).extend(rows)
            for row, divergence in zip(rows, (said or {}).get("guidance_kl") or (), strict=False):
                assert (row is None) == (divergence is None)
                assert divergence is None or divergence >= -1e-6
    assert [len(rows) for rows in shown.values()] == [NUM_TOKENS] * 4
    for rows in shown.values():
        assert [i for i, row in enumerate(rows) if row is not None] == [3, 4, 5, 6, 7, 8]
        assert {len(row) for row in rows if row is not None} == {2}
    report: Any = chunks[-1].model_extra and chunks[-1].model_extra["guidance"]
    assert report["guided_tokens"] == 4 * 6
    assert report["streams"] == 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"guidance_streams": [{"weight": 1, "lora": "nobody"}]},
            "guidance_streams[0].lora",
            "not the name of an adapter. Known: none",
        ),
        (
            {"guidance_streams": [{"weight": 1, "prompt": "a"}] * 9},
            "guidance_streams",
            "takes 9 with the conditional one",
        ),
        (
            {"guidance_streams": [{"weight": 1, "prompt": "a " * 5000}]},
            "guidance_streams[0].prompt",
            "cannot be used",
        ),
        (
            {"guidance_streams": [{"weight": 1, "token_ids": [10**6]}]},
            "guidance_streams[0].token_ids",
            "cannot be used",
        ),
    ],
)
def test_streams_that_cannot_be_used_are_refused(
    client: openai.OpenAI, model: str, fields: Json, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=4, extra_body=fields)
    assert caught.value.param == param
    assert words in str(caught.value)
