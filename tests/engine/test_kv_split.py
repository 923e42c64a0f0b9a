"""`kv_split="even"`: leaders and followers have half of the KV pool each.

The tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, differences, mixture, tokens
from tests.engine.oracle import CASES, Oracle

NUM_BLOCKS = 20
"""Ten blocks for each role. One stream of max_model_len needs eight."""


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(
        model_folder("llama"),
        kv_split="even",
        num_gpu_blocks_override=1 + NUM_BLOCKS,
        max_num_batched_tokens=256,
        max_num_seqs=64,
    )
    yield engine
    engine.close()


@pytest.fixture
def most_held(engine: Engine) -> Iterator[dict[str, int]]:
    """The most blocks that each role held after any step."""
    most = {"leader_blocks": 0, "follower_blocks": 0}
    original = engine.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        stats = engine.stats()
        for role in most:
            most[role] = max(most[role], stats[role])
        return output

    engine.scheduler.schedule = schedule
    yield most
    del engine.scheduler.schedule


def test_even_halves(engine: Engine, llama: Oracle, most_held: dict[str, int]) -> None:
    """The tokens equal HF's, and the pool is so full that groups are preempted.

    Each role comes close to its half, and does not exceed it.
    """
    assert engine.stats()["total_blocks"] == NUM_BLOCKS
    assert differences(engine.guide(CASES), llama.guided) == []
    assert engine.stats()["group_preemptions"] > 0
    half = NUM_BLOCKS // 2
    assert all(half - 2 <= held <= half for held in most_held.values()), most_held


def test_plain_requests_stay_in_the_leaders_half(
    engine: Engine, llama: Oracle, most_held: dict[str, int]
) -> None:
    prompts, params, want = mixture(llama)
    assert differences(tokens(engine.generate(prompts, params)), want) == []
    assert 0 < most_held["follower_blocks"] <= NUM_BLOCKS // 2
    assert NUM_BLOCKS // 2 - 2 <= most_held["leader_blocks"] <= NUM_BLOCKS // 2


def test_elastic_split_crosses_the_middle(
    model_folder: Callable[[str], Path], llama: Oracle
) -> None:
    """The same load on the default split: followers of long negatives take more than half."""
    engine = Engine(
        model_folder("llama"),
        num_gpu_blocks_override=1 + NUM_BLOCKS,
        max_num_batched_tokens=256,
        max_num_seqs=64,
    )
    try:
        long_negatives = [
            i for i, case in enumerate(CASES) if len(case.negative) > 4 * len(case.prompt)
        ]
        most = 0
        original = engine.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            output = original(*args, **kwargs)
            most = max(most, engine.stats()["follower_blocks"])
            return output

        engine.scheduler.schedule = schedule
        got = engine.guide([CASES[i] for i in long_negatives])
        assert differences(got, [llama.guided[i] for i in long_negatives]) == []
        assert most > NUM_BLOCKS // 2
    finally:
        engine.close()
