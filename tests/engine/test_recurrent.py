"""Models with recurrent state give the tokens of the reference.

A state cannot be undone. These tests are those of test_equality_architectures.py, with vLLM's
prefix caching of states ("align") and without. The expected tokens are those of the reference on
transformers' model, without a cache: `generate(guidance_scale=...)` of transformers 5.19 loses the
negative stream's state of a Mamba2 model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cfg_core.reference import guided_generate, plain_generate
from tests.engine import paths, tiny_models
from tests.engine.chosen import chosen
from tests.engine.engines import ROOMY, TIGHT, Engine, differences, mixture, plain, tokens
from tests.engine.oracle import CASES, MIN_MARGIN, NEW_TOKENS, PROMPTS, Case, Oracle
from tests.engine.tiny_models import PAD

pytestmark = pytest.mark.slow

CACHING = {"align": True, "none": False}
"""vLLM's `mamba_cache_mode`, with its prefix caching and without."""
MODELS = [model.__name__ for model in tiny_models.RECURRENT]
IN_CI = {"mamba2 align", "falcon_h1 align", "falcon_h1 none"}
"""mamba2 has nothing but states, falcon_h1 states and attention in one layer."""
ROWS = chosen(list(itertools.product(MODELS, CACHING)), IN_CI, name=" ".join)
FEW_BLOCKS = {"mamba2": 8, "falcon_h1": 11, "granite_hybrid": 11}
"""Few enough that groups are preempted, and enough for the largest one."""
BATCH = 12
"""Texts that the reference continues at once."""
PREEMPTS = {(name, "align") for name in FEW_BLOCKS}
"""Without caching, a stream has its state from the start, and grows by few blocks of attention."""


class RecurrentOracle(Oracle):
    """The reference instead of `generate`, and without a cache. Many texts go in one batch."""

    takes_suffixes = False

    @functools.cached_property
    def guided(self) -> list[list[int]]:
        return in_batches(self._guide, CASES)

    @functools.cached_property
    def plain(self) -> list[list[int]]:
        return in_batches(self._continue, PROMPTS)

    @torch.inference_mode()
    def _guide(self, cases: Sequence[Case]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in cases]
        scales = torch.tensor([[case.scale] for case in cases])
        for _ in range(NEW_TOKENS):
            pairs = list(zip(cases, texts, strict=True))
            own = last_rows(self.model, [[*case.prompt, *text] for case, text in pairs])
            other = last_rows(self.model, [[*case.negative, *text] for case, text in pairs])
            append(texts, other + scales * (own - other))
        return texts

    @torch.inference_mode()
    def _continue(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        for _ in range(NEW_TOKENS):
            whole = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
            append(texts, last_rows(self.model, whole))
        return texts


def in_batches(each: Callable[[Sequence[Any]], list[list[int]]], rows: Sequence[Any]) -> Any:
    """The texts of all rows, a few rows at a time: states take much memory."""
    return [text for i in range(0, len(rows), BATCH) for text in each(rows[i : i + BATCH])]


def last_rows(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """The log-probabilities after each text, [texts, vocabulary].

    Shorter texts are filled up at their end, which no token before can see.
    """
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[PAD] * (longest - len(text))] for text in texts])
    last = torch.tensor([len(text) - 1 for text in texts])
    return torch.log_softmax(model(ids).logits[torch.arange(len(texts)), last].float(), -1)


def append(texts: list[list[int]], scores: torch.Tensor) -> None:
    for text, token in zip(texts, scores.argmax(-1).tolist(), strict=True):
        text.append(token)


class Bench(NamedTuple):
    name: str
    oracle: Oracle
    folder: Path


@functools.lru_cache(maxsize=1)
def oracle_in(folder: Path) -> RecurrentOracle:
    return RecurrentOracle(folder)


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model, and whether its states are cached."""
    name, mode = request.param
    return name, mode


@pytest.fixture(scope="module")
def bench(row: tuple[str, str], model_folder: Callable[[str], Path]) -> Bench:
    folder = model_folder(row[0])
    bench = Bench(row[0], oracle_in(folder), folder)
    assert bench.oracle.margin > MIN_MARGIN
    return bench


@pytest.fixture(scope="module")
def mode(row: tuple[str, str]) -> str:
    return row[1]


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


def test_texts_in_a_batch_are_those_of_the_reference(bench: Bench) -> None:
    model, new = bench.oracle.model, {"max_new_tokens": NEW_TOKENS}
    for i in range(0, len(CASES), 13):
        case = CASES[i]
        text = guided_generate(model, case.prompt, case.negative, scale=case.scale, **new)
        assert text.token_ids == bench.oracle.guided[i]
    for prompt, text in list(zip(PROMPTS, bench.oracle.plain, strict=True))[::6]:
        assert plain_generate(model, prompt, **new).token_ids == text


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


def test_samples_that_cannot_be_taken_back(tight: Engine, bench: Bench) -> None:
    """Groups that are planned wrongly are computed again, and remain exact."""
    before = tight.stats()["recomputed_streams"]
    with tight.planned_wrongly():
        assert differences(tokens_of(tight, CASES[::3]), bench.oracle.guided[::3]) == []
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
    path = dataclasses.replace(path, step=4 if path.v2 else 1)  # interpreted
    folder = model_folder("falcon_h1")
    oracle = oracle_in(folder)
    report = paths.run(path, folder, oracle, enable_prefix_caching=not path.v2)
    assert paths.differences(path, report, oracle) == []
