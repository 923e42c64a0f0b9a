"""Plain requests give the same tokens on a guided engine as on stock vLLM.

They run mixed with groups, and without any group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.engine.engines import BUDGET_16, ROOMY, Engine, guided, plain, tokens
from tests.engine.oracle import CASES, PROMPTS, Oracle

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

SETTINGS = {"roomy": ROOMY, "budget-16": BUDGET_16}


class Answers(NamedTuple):
    """The answers of an engine to the same plain requests.

    alone: without any group.
    mixed: mixed with groups; None if the engine is not guided.
    """

    alone: list[RequestOutput]
    mixed: list[RequestOutput] | None


def plain_params() -> list[SamplingParams]:
    """For each of PROMPTS: greedy with logprobs, sampled with a seed, and with many options."""
    greedy = [plain(logprobs=5) for _ in PROMPTS]
    seeded = [plain(temperature=1.0, seed=i, logprobs=1) for i in range(len(PROMPTS))]
    shaped = [
        plain(
            temperature=0.8,
            top_p=0.9,
            top_k=40,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            seed=100 + i,
        )
        for i in range(len(PROMPTS))
    ]
    return greedy + seeded + shaped


@pytest.fixture(scope="module", params=SETTINGS)
def settings(request: pytest.FixtureRequest) -> dict[str, int]:
    """The small budget is for greedy requests only.

    Stock vLLM on a CPU crashes on seeded sampling with chunked prompts.
    """
    return SETTINGS[request.param]


def ask(engine: Engine, settings: dict[str, int]) -> Answers:
    params = plain_params() if settings is ROOMY else [plain(logprobs=5) for _ in PROMPTS]
    prompts = (PROMPTS * 3)[: len(params)]
    alone = engine.generate(prompts, params)
    if not engine.guided:
        return Answers(alone, None)
    groups = CASES[2::6]
    both = [x for pair in zip(PROMPTS, [c.prompt for c in groups], strict=True) for x in pair]
    both_params = [
        x for pair in zip(params[: len(PROMPTS)], map(guided, groups), strict=True) for x in pair
    ]
    outputs = engine.generate(both + prompts[len(PROMPTS) :], both_params + params[len(PROMPTS) :])
    return Answers(alone, outputs[: len(both) : 2] + outputs[len(both) :])


@pytest.fixture(scope="module")
def stock(model_folder: Callable[[str], Path], settings: dict[str, int]) -> list[RequestOutput]:
    engine = Engine(model_folder("llama"), guided=False, **settings)
    try:
        return ask(engine, settings).alone
    finally:
        engine.close()


@pytest.fixture(scope="module")
def ours(
    model_folder: Callable[[str], Path], settings: dict[str, int], stock: list[RequestOutput]
) -> Iterator[Answers]:
    engine = Engine(model_folder("llama"), **settings)
    try:
        yield ask(engine, settings)
    finally:
        engine.close()


def test_stock_equals_hf(stock: list[RequestOutput], llama: Oracle) -> None:
    assert tokens(stock)[: len(PROMPTS)] == llama.plain


def test_without_groups_tokens_and_logprobs_are_identical(
    stock: list[RequestOutput], ours: Answers
) -> None:
    assert tokens(ours.alone) == tokens(stock)
    assert [o.outputs[0].logprobs for o in ours.alone] == [o.outputs[0].logprobs for o in stock]
    assert stock[0].outputs[0].logprobs is not None


def test_mixed_with_groups_tokens_are_identical(stock: list[RequestOutput], ours: Answers) -> None:
    assert ours.mixed is not None
    assert tokens(ours.mixed) == tokens(stock)
