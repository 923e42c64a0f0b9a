"""Models with recurrent state give the tokens of the reference.

A state cannot be undone. These tests are those of test_equality_architectures.py, with vLLM's
prefix caching of states ("align") and without. The expected tokens are those of the reference on
transformers' model, without a cache: `generate(guidance_scale=...)` of transformers 5.19 loses the
negative stream's state of a Mamba2 model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cfg_core.reference import guided_generate, plain_generate
from tests.engine import paths, tiny_models
from tests.engine.chosen import chosen
from tests.engine.engines import ROOMY, TIGHT, Engine, differences, mixture, plain, tokens
from tests.engine.oracle import CASES, MIN_MARGIN, NEW_TOKENS, PROMPTS, Oracle

pytestmark = pytest.mark.slow

CACHING = {"align": True, "none": False}
"""vLLM's `mamba_cache_mode`, with its prefix caching and without."""
MODELS = chosen([f.__name__ for f in tiny_models.RECURRENT], {"mamba2", "falcon_h1"})
"""Nothing but states, and states and attention in one layer."""
FEW_BLOCKS = {"mamba2": 8, "falcon_h1": 11, "granite_hybrid": 11}
"""Few enough that groups are preempted, and enough for the largest one."""
PREEMPTS = {(name, "align") for name in FEW_BLOCKS}
"""Without caching, a stream has its state from the start, and grows by few blocks of attention."""


class RecurrentOracle(Oracle):
    """The reference instead of `generate`, and without a cache."""

    takes_suffixes = False

    @functools.cached_property
    def guided(self) -> list[list[int]]:
        return [
            guided_generate(
                self.model, case.prompt, case.negative, scale=case.scale, max_new_tokens=NEW_TOKENS
            ).token_ids
            for case in CASES
        ]

    @functools.cached_property
    def plain(self) -> list[list[int]]:
        return [
            plain_generate(self.model, prompt, max_new_tokens=NEW_TOKENS).token_ids
            for prompt in PROMPTS
        ]


class Bench(NamedTuple):
    name: str
    oracle: Oracle
    folder: Path


@pytest.fixture(scope="module", params=MODELS)
def bench(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Bench:
    folder = model_folder(request.param)
    oracle = RecurrentOracle(folder)
    assert oracle.margin > MIN_MARGIN
    return Bench(request.param, oracle, folder)


@pytest.fixture(scope="module", params=CACHING)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def roomy(bench: Bench, mode: str) -> Iterator[Engine]:
    engine = Engine(bench.folder, **ROOMY, enable_prefix_caching=CACHING[mode])
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight(bench: Bench, mode: str) -> Iterator[Engine]:
    few = {**TIGHT, "num_gpu_blocks_override": FEW_BLOCKS[bench.name]}
    engine = Engine(bench.folder, **few, enable_prefix_caching=CACHING[mode])
    yield engine
    engine.close()


def test_guidance_changes_the_text(bench: Bench) -> None:
    plain_texts = [text for text in bench.oracle.plain for _ in range(6)]
    changed = sum(a != b for a, b in zip(bench.oracle.guided, plain_texts, strict=True))
    assert changed >= 70


def test_in_one_batch_and_repeated(roomy: Engine, bench: Bench, mode: str) -> None:
    """With caching, the second round begins with states of the first."""
    assert roomy.scheduler.cache_config.mamba_cache_mode == mode
    assert differences(roomy.guide(CASES), bench.oracle.guided) == []
    with roomy.prefix_hits() as hits:
        assert differences(roomy.guide(CASES), bench.oracle.guided) == []
    found = [hits.get(case.prompt, 0) + hits.get(case.negative, 0) for case in CASES]
    assert any(found) == CACHING[mode]


def test_alone(roomy: Engine, bench: Bench) -> None:
    cases = CASES[::6]
    assert differences([roomy.guide([c])[0] for c in cases], bench.oracle.guided[::6]) == []


def test_mixed_with_plain_requests(roomy: Engine, bench: Bench) -> None:
    prompts, params, want = mixture(bench.oracle)
    assert differences(tokens(roomy.generate(prompts, params)), want) == []


def test_chunked_and_in_a_small_pool(tight: Engine, bench: Bench, mode: str) -> None:
    with tight.whole_preemptions():
        assert differences(tight.guide(CASES), bench.oracle.guided) == []
    stats = tight.stats()
    assert (stats["group_preemptions"] > 0) >= ((bench.name, mode) in PREEMPTS)
    assert stats["recomputed_streams"] == 0


def test_chunked_in_a_small_pool_and_mixed(tight: Engine, bench: Bench) -> None:
    prompts, params, want = mixture(bench.oracle)
    assert differences(tokens(tight.generate(prompts, params)), want) == []


def test_samples_that_cannot_be_taken_back(
    tight: Engine, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that are planned wrongly are computed again, and remain exact.

    Each stream may sample as soon as it has read its prompt.
    """
    from cfg_core.vllm_plugin.core.scheduler import EVERYTHING

    scheduler = tight.scheduler
    carry_out = scheduler._carry_out
    solo = iter(range(200))

    def let_all_sample(plan):
        carry_out(plan)
        spoil = next(solo, None) is not None
        object.__setattr__(plan, "sampling", EVERYTHING if spoil else plan.sampling)

    before = tight.stats()["recomputed_streams"]
    monkeypatch.setattr(scheduler, "_carry_out", let_all_sample)
    assert differences(tokens_of(tight, CASES), bench.oracle.guided) == []
    assert tight.stats()["recomputed_streams"] > before


def tokens_of(engine: Engine, cases: list) -> list[list[int]]:
    """As `Engine.guide`, but joint steps may be done twice."""
    from tests.engine.engines import guided

    return tokens(engine.generate([c.prompt for c in cases], [guided(c) for c in cases]))


def test_plain_requests_equal_stock(roomy: Engine, bench: Bench) -> None:
    """Greedy, and sampled with seeds. Stock vLLM runs without prefix caching (cpu_faults.py)."""
    params = [plain() for _ in PROMPTS]
    params += [plain(temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    ours = tokens(roomy.generate(PROMPTS * 2, params))
    stock = Engine(bench.folder, guided=False, **ROOMY, enable_prefix_caching=False)
    try:
        assert tokens(stock.generate(PROMPTS * 2, params)) == ours
    finally:
        stock.close()


PATHS = [
    path for path in paths.PATHS if path.name in ("V1 async TP1", "V2 async TP1", "V1 sync PP2")
]


@pytest.mark.parametrize("path", chosen(PATHS, {"V2 async TP1"}, name=lambda path: path.name))
def test_other_paths(path: paths.EnginePath, model_folder: Callable[[str], Path]) -> None:
    """Async scheduling, a pipeline and Model Runner V2. On V2, states are not cached here."""
    folder = model_folder("falcon_h1")
    oracle = RecurrentOracle(folder)
    report = paths.run(path, folder, oracle, enable_prefix_caching=not path.v2)
    assert paths.differences(path, report, oracle) == []
