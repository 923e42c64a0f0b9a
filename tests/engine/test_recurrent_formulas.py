"""Models with recurrent state: groups of several streams, windows, schedules, cuts and scores.

The requests and what is expected are those of test_formulas.py and test_scoring.py. Everything runs
twice, so the second time begins with cached states where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cfg_core.errors import REQUEST_FAULT
from tests.engine.engines import ROOMY, Engine, differences, plain, tokens
from tests.engine.formulas import MAX_MODEL_LEN, answers, request
from tests.engine.scored_texts import NAMES, is_right, scored, values
from tests.engine.test_recurrent import CACHING, MODELS, RecurrentOracle

pytestmark = pytest.mark.slow

LENGTH = 12
ROUNDS = 2
FEW_BLOCKS = {"mamba2": 18, "falcon_h1": 28, "granite_hybrid": 28}
"""The group of eight streams takes most of them, so others wait for it."""


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(name: str, model_folder: Callable[[str], Path]) -> RecurrentOracle:
    return RecurrentOracle(model_folder(name))


@pytest.fixture(scope="module", params=["align", "none", "tight"])
def engine(
    request: pytest.FixtureRequest, name: str, model_folder: Callable[[str], Path]
) -> Iterator[Engine]:
    kind = str(request.param)
    options = {**ROOMY, "max_model_len": MAX_MODEL_LEN}
    options["enable_prefix_caching"] = CACHING.get(kind, True)
    if kind == "tight":
        options |= {"max_num_batched_tokens": 64, "max_num_seqs": 32}
        options["num_gpu_blocks_override"] = FEW_BLOCKS[name]
    engine = Engine(model_folder(name), **options)
    yield engine
    engine.close()


@torch.inference_mode()
def test_formulas(engine: Engine, oracle: RecurrentOracle) -> None:
    every = answers(oracle)
    prompts = [one.request.prompt for one in every]
    params = [plain(extra_args=one.request.extra_args, max_tokens=LENGTH) for one in every]
    for _ in range(ROUNDS):
        got = tokens(engine.generate(prompts, params))
        assert differences(got, [one.token_ids[:LENGTH] for one in every]) == []


@torch.inference_mode()
def test_scores(engine: Engine, oracle: RecurrentOracle) -> None:
    every = [scored(name, 0) for name in NAMES]
    for _ in range(ROUNDS):
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
