"""Windows and experts give the tokens of Hugging Face `generate(guidance_scale=...)`.

Each runs on three engines: a roomy one, a tight one (token budget 16 and so few blocks that groups
are preempted), and stock vLLM for the plain requests. Llama has the full matrix in
test_equality_llama.py. All other architectures are rows of tools/architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.engines import ROOMY, TIGHT, Engine, differences, mixture, plain, tokens
from tests.engine.oracle import CASES, MIN_MARGIN, PROMPTS, Oracle

pytestmark = pytest.mark.slow

ARCHITECTURES = ("gemma2", "qwen3_moe")
KV_GROUPS = {"gemma2": 2}
"""Sliding and full layers keep blocks of their own.

So the same tokens need twice as many blocks.
"""


class Bench(NamedTuple):
    oracle: Oracle
    start: Callable[..., Engine]
    kv_groups: int


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(
    request: pytest.FixtureRequest,
    model_folder: Callable[[str], Path],
    oracle_of: Callable[[str], Oracle],
) -> Bench:
    name: str = request.param
    oracle = oracle_of(name)
    assert oracle.margin > MIN_MARGIN
    return Bench(
        oracle, lambda **options: Engine(model_folder(name), **options), KV_GROUPS.get(name, 1)
    )


@pytest.fixture(scope="module")
def roomy(bench: Bench) -> Iterator[Engine]:
    engine = bench.start(**ROOMY)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight(bench: Bench) -> Iterator[Engine]:
    engine = bench.start(**{**TIGHT, "num_gpu_blocks_override": 1 + bench.kv_groups * 15})
    yield engine
    engine.close()


def test_guidance_changes_the_text(bench: Bench) -> None:
    """Otherwise the equalities below would hold for an engine without guidance."""
    plain_texts = [text for text in bench.oracle.plain for _ in range(6)]
    changed = sum(a != b for a, b in zip(bench.oracle.guided, plain_texts, strict=True))
    assert changed >= 70
    assert len({tuple(text) for text in bench.oracle.guided}) >= 70


def test_reference_equals_hf(bench: Bench) -> None:
    got = [bench.oracle.reference(case).token_ids for case in CASES[::7]]
    assert differences(got, bench.oracle.guided[::7]) == []


def test_alone(roomy: Engine, bench: Bench) -> None:
    assert differences([roomy.guide([case])[0] for case in CASES], bench.oracle.guided) == []


def test_in_one_batch_and_repeated(roomy: Engine, bench: Bench) -> None:
    """The second round finds the prompts of both streams in the prefix cache."""
    assert differences(roomy.guide(CASES), bench.oracle.guided) == []
    with roomy.prefix_hits() as hits:
        assert differences(roomy.guide(CASES), bench.oracle.guided) == []
    assert all(hits[case.prompt] > 0 for case in CASES if len(case.prompt) > 32)
    assert all(hits[case.negative] > 0 for case in CASES if len(case.negative) > 32)


def test_mixed_with_plain_requests(roomy: Engine, bench: Bench) -> None:
    """The plain requests equal HF here, and stock vLLM in `test_plain_requests_equal_stock`."""
    prompts, params, want = mixture(bench.oracle)
    assert differences(tokens(roomy.generate(prompts, params)), want) == []


def test_chunked_and_preempted(tight: Engine, bench: Bench) -> None:
    with tight.whole_preemptions():
        assert differences(tight.guide(CASES), bench.oracle.guided) == []
    assert tight.stats()["group_preemptions"] > 0


def test_chunked_preempted_and_mixed(tight: Engine, bench: Bench) -> None:
    prompts, params, want = mixture(bench.oracle)
    assert differences(tokens(tight.generate(prompts, params)), want) == []


def test_plain_requests_equal_stock(roomy: Engine, bench: Bench) -> None:
    """Greedy, and sampled with seeds. No group is in the engine.

    The texts are those of vLLM without the plugin.
    """
    params = [plain() for _ in PROMPTS] + [
        plain(temperature=1.0, seed=i) for i in range(len(PROMPTS))
    ]
    ours = tokens(roomy.generate(PROMPTS * 2, params))
    stock = bench.start(guided=False, **ROOMY)
    try:
        assert tokens(stock.generate(PROMPTS * 2, params)) == ours
    finally:
        stock.close()
