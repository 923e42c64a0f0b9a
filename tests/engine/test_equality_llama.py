"""Llama: the engine gives the tokens of Hugging Face `generate` with guidance.

Tested are greedy decoding in float32, 12 pairs x 6 scales, and every way in which the engine may
split, mix, cache or repeat the work. The other architectures follow in
test_equality_architectures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.engines import (
    BLOCK_SIZE,
    BUDGET_16,
    ROOMY,
    SMALL_POOL,
    Engine,
    differences,
    mixture,
    tokens,
)
from tests.engine.oracle import CASES, Case, Oracle, make_pairs

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def roomy(model_folder: ModelFolder) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), **ROOMY)
    yield engine
    engine.close()


@pytest.fixture
def engine_with(model_folder: ModelFolder) -> Iterator[Callable[..., Engine]]:
    """An engine for one test."""
    engines: list[Engine] = []

    def start(**options: object) -> Engine:
        engines.append(Engine(model_folder("llama"), **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_guidance_changes_the_text(llama: Oracle) -> None:
    """Otherwise the equalities below would hold for an engine without guidance."""
    by_pair = zip(*[iter(llama.guided)] * 6, strict=True)
    for texts, unguided in zip(by_pair, llama.plain, strict=True):
        assert len({tuple(text) for text in [*texts, unguided]}) == 7


def test_reference_equals_hf(llama: Oracle) -> None:
    """The executable specification and HF agree.

    This is the second link of the chain from the engine to HF.
    """
    sample = CASES[::7]
    assert (
        differences([llama.reference(case).token_ids for case in sample], llama.guided[::7]) == []
    )


def test_alone(roomy: Engine, llama: Oracle) -> None:
    assert differences([roomy.guide([case])[0] for case in CASES], llama.guided) == []


def test_in_one_batch(roomy: Engine, llama: Oracle) -> None:
    assert differences(roomy.guide(CASES), llama.guided) == []
    assert roomy.stats()["group_preemptions"] == 0


def test_repeated_prompts_are_found_in_the_prefix_cache_of_both_streams(
    roomy: Engine, llama: Oracle
) -> None:
    """The prompts are new, so the first round has no cache hit.

    The second round finds every whole block except that of the last token.
    """
    cases = [Case(prompt, negative, 2.0) for prompt, negative in make_pairs(seed=8)]
    with roomy.prefix_hits() as cold:
        first = roomy.guide(cases)
    with roomy.prefix_hits() as warm:
        second = roomy.guide(cases)
    assert differences(first, [llama.reference(case).token_ids for case in cases]) == []
    assert differences(second, first) == []
    assert set(cold) == set(warm) == {s for case in cases for s in (case.prompt, case.negative)}
    assert not any(cold.values())
    assert warm == {stream: (len(stream) - 1) // BLOCK_SIZE * BLOCK_SIZE for stream in warm}


def test_a_negative_shared_between_requests_is_computed_once(roomy: Engine, llama: Oracle) -> None:
    """Three prompts run one after the other, with one negative of 120 tokens.

    Three of its blocks are found in the cache.
    """
    pairs = make_pairs(seed=9)
    negative = pairs[9][1]
    for i, (prompt, _) in enumerate(pairs[:3]):
        case = Case(prompt, negative, 3.0)
        with roomy.prefix_hits() as hits:
            got = roomy.guide([case])
        assert differences(got, [llama.reference(case).token_ids]) == []
        assert hits[negative] == (0 if i == 0 else 96)


def test_mixed_with_plain_requests(roomy: Engine, llama: Oracle) -> None:
    prompts, params, want = mixture(llama)
    assert differences(tokens(roomy.generate(prompts, params)), want) == []


def test_token_budget_of_16(engine_with: Callable[..., Engine], llama: Oracle) -> None:
    """Chunked prefill: the two streams of a group reach their joint step at different times."""
    engine = engine_with(**BUDGET_16)
    assert differences(engine.guide(CASES), llama.guided) == []
    prompts, params, want = mixture(llama)
    assert differences(tokens(engine.generate(prompts, params)), want) == []


def test_groups_are_preempted_whole(engine_with: Callable[..., Engine], llama: Oracle) -> None:
    engine = engine_with(**SMALL_POOL)
    with engine.whole_preemptions() as preempted:
        assert differences(engine.guide(CASES), llama.guided) == []
        assert len(preempted) >= engine.stats()["group_preemptions"] > 0
        prompts, params, want = mixture(llama)
        assert differences(tokens(engine.generate(prompts, params)), want) == []


def test_priority_policy(engine_with: Callable[..., Engine], llama: Oracle) -> None:
    """Three priorities in a small pool.

    Later, more urgent groups preempt others, and every group finishes.
    """
    engine = engine_with(scheduling_policy="priority", **SMALL_POOL)
    prompts, params, want = mixture(llama)
    priority = [(7 * i) % 3 for i in range(len(prompts))]
    with engine.whole_preemptions():
        assert differences(tokens(engine.generate(prompts, params, priority=priority)), want) == []
    assert engine.stats()["group_preemptions"] > 0
