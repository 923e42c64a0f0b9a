"""Guided requests at a vocabulary of 151,936. Long prompts: test_http_at_real_size.py.

The expected tokens and values are those of the reference loop. Where it finds two tokens nearly as
likely, rounding may decide, and what follows is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cfg_core.reference import guided_generate, plain_generate
from tests.engine.engines import Engine, plain
from tests.real_size.at_real_size import (
    NUM_TOKENS,
    Reference,
    assert_logprobs_are_right,
    assert_same,
    guided,
    ids,
)

LENGTHS = ((20, 7), (7, 20), (100, 130), (1_000, 40))
"""Tokens of prompts and of their negatives."""


@pytest.fixture(autouse=True)
def _forget(reference: Reference) -> Iterator[None]:
    yield
    reference.forget()


def test_guided_and_plain_texts_are_those_of_the_reference(
    engine: Engine, reference: Reference
) -> None:
    pairs = [(ids(f"p{i}", a), ids(f"n{i}", b)) for i, (a, b) in enumerate(LENGTHS)]
    scales = (1.5, 3.0, 0.0, 7.5)
    params = [guided(n, scale) for (_, n), scale in zip(pairs, scales, strict=True)]
    params += [plain(max_tokens=NUM_TOKENS)] * len(pairs)
    found = engine.generate([prompt for prompt, _ in pairs] * 2, params)
    for (prompt, negative), scale, one in zip(pairs, scales, found, strict=False):
        want = guided_generate(reference, prompt, negative, scale=scale, max_new_tokens=NUM_TOKENS)
        assert_same(one.outputs[0].token_ids, want)
    for (prompt, _), one in zip(pairs, found[len(pairs) :], strict=True):
        assert_same(
            one.outputs[0].token_ids, plain_generate(reference, prompt, max_new_tokens=NUM_TOKENS)
        )


def test_log_probabilities_of_all_streams_are_those_of_the_reference(
    engine: Engine, reference: Reference
) -> None:
    assert_logprobs_are_right(engine, reference, ids("p", 30), ids("n", 20))


def test_a_bias_of_300_tokens(engine: Engine, reference: Reference) -> None:
    prompt, negative = ids("p", 20), ids("n", 9)
    bias = dict.fromkeys(ids("bias", 300), 12.0)

    def push(scores: torch.Tensor, _: list[int], __: list[int]) -> torch.Tensor:
        scores[list(bias)] += 12.0
        return scores

    (found,) = engine.generate([prompt], [guided(negative, logit_bias=bias)])
    want = guided_generate(
        reference, prompt, negative, scale=1.5, max_new_tokens=NUM_TOKENS, processors=[push]
    )
    assert set(want.token_ids) & bias.keys()
    assert_same(found.outputs[0].token_ids, want)


def test_128_stop_strings(engine: Engine) -> None:
    prompt, negative = ids("p", 20), ids("n", 9)
    (whole,) = engine.generate([prompt], [guided(negative, max_tokens=40)])
    text = whole.outputs[0].text
    stop = [f"no such text {i}" for i in range(127)] + [text[60:64]]
    (found,) = engine.generate([prompt], [guided(negative, max_tokens=40, stop=stop)])
    assert found.outputs[0].text == text[: text.index(text[60:64])]
    assert found.outputs[0].finish_reason == "stop"


def test_64_choices_are_those_of_64_requests(engine: Engine) -> None:
    """vLLM gives each choice the seed of the request plus its number."""
    prompt, negative = ids("p", 20), ids("n", 9)
    options = {"temperature": 1.0, "max_tokens": 6}
    before = engine.stats()["joint_steps"]
    (found,) = engine.generate([prompt], [guided(negative, n=64, seed=5, **options)])
    assert engine.stats()["joint_steps"] - before == 64 * 6
    got = [list(choice.token_ids) for choice in found.outputs]
    params = [guided(negative, seed=5 + i, **options) for i in range(64)]
    want = [list(one.outputs[0].token_ids) for one in engine.generate([prompt] * 64, params)]
    assert got == want
    assert len(set(map(tuple, got))) == 64
