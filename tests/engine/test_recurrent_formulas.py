"""Models with recurrent state: groups of several streams, windows, schedules, cuts and scores.

The requests and what is expected are those of test_formulas.py and test_scoring.py. Where states
are cached, everything runs twice, so the second time begins with cached ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cfg_core.errors import REQUEST_FAULT
from tests.engine.chosen import chosen
from tests.engine.engines import ROOMY, Engine, differences, plain, tokens
from tests.engine.formulas import MAX_MODEL_LEN, answers, request
from tests.engine.scored_texts import NAMES, is_right, scored, values
from tests.engine.test_recurrent import CACHING, MODELS, RecurrentOracle, oracle_in

pytestmark = pytest.mark.slow

LENGTH = 12
KINDS = ("align", "none", "tight")
"""With cached states, without, and with cached ones in a small pool."""
IN_CI = {"mamba2 tight", "falcon_h1 none", "falcon_h1 tight"}
ROWS = chosen(list(itertools.product(MODELS, KINDS)), IN_CI, name=" ".join)
FEW_BLOCKS = {"mamba2": 18, "falcon_h1": 28, "granite_hybrid": 28}
"""The group of eight streams takes most of them, so others wait for it."""


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model, and a kind of engine."""
    name, kind = request.param
    return name, kind


@pytest.fixture(scope="module")
def oracle(row: tuple[str, str], model_folder: Callable[[str], Path]) -> RecurrentOracle:
    return oracle_in(model_folder(row[0]))


@pytest.fixture(scope="module")
def rounds(row: tuple[str, str]) -> range:
    return range(1 if row[1] == "none" else 2)


@pytest.fixture(scope="module")
def engine(row: tuple[str, str], model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    name, kind = row
    options = {**ROOMY, "max_model_len": MAX_MODEL_LEN}
    options["enable_prefix_caching"] = CACHING.get(kind, True)
    if kind == "tight":
        options |= {"max_num_batched_tokens": 64, "max_num_seqs": 32}
        options["num_gpu_blocks_override"] = FEW_BLOCKS[name]
    engine = Engine(model_folder(name), **options)
    yield engine
    engine.close()


@torch.inference_mode()
def test_formulas(engine: Engine, oracle: RecurrentOracle, rounds: range) -> None:
    every = answers(oracle)
    prompts = [one.request.prompt for one in every]
    params = [plain(extra_args=one.request.extra_args, max_tokens=LENGTH) for one in every]
    for _ in rounds:
        got = tokens(engine.generate(prompts, params))
        assert differences(got, [one.token_ids[:LENGTH] for one in every]) == []


@torch.inference_mode()
def test_scores(engine: Engine, oracle: RecurrentOracle, rounds: range) -> None:
    every = [scored(name, 0) for name in NAMES]
    for _ in rounds:
        outputs = engine.generate([one.prompt for one in every], [one.asking() for one in every])
        for one, output in zip(every, outputs, strict=True):
            assert is_right(one, oracle, values(one, output.prompt_logprobs)), one.request.name


def test_a_group_that_can_never_fit_is_told(model_folder: Callable[[str], Path]) -> None:
    """Admission counts tokens, and here eight states take more blocks than these need."""
    few = {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 64, "max_num_seqs": 32}
    engine = Engine(model_folder("falcon_h1"), max_model_len=MAX_MODEL_LEN, **few)
    try:
        one = request("eight streams", 0)
        params = plain(extra_args=one.extra_args, max_tokens=LENGTH)
        (output,) = engine.generate([one.prompt], [params])
        (choice,) = output.outputs
        assert choice.finish_reason == "error"
        assert str(choice.stop_reason).startswith(REQUEST_FAULT)
        assert "its 8 streams with 12 more tokens each can never fit" in str(choice.stop_reason)
        pair = request("two streams", 0)
        params = plain(extra_args=pair.extra_args, max_tokens=LENGTH)
        assert len(tokens(engine.generate([pair.prompt], [params]))[0]) == LENGTH
    finally:
        engine.close()
