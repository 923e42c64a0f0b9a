"""Every sampling option under guidance, against the reference loop: see options.py, which has the table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import options
import pytest
import witness
from engines import ROOMY, Engine
from oracle import Oracle

pytestmark = pytest.mark.slow
IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), logits_processors=witness.CONFIG, **ROOMY)
    yield engine
    engine.close()


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.name)
def test_the_text_is_that_of_the_reference(engine: Engine, llama: Oracle, option: options.Option) -> None:
    cases, num_tokens = options.chosen(IS_V2)
    assert options.differing(engine, llama, option, cases, num_tokens) == []


@pytest.mark.parametrize("name", ["repetition_penalty", "logit_bias", "logits_processors"])
def test_the_comparison_can_fail(engine: Engine, llama: Oracle, name: str) -> None:
    """The reference without the processor gives other texts."""
    cases, num_tokens = options.chosen(IS_V2)
    (option,) = [option for option in options.OPTIONS if option.name == name]
    assert options.differing(engine, llama, dataclasses.replace(option, processors=()), cases, num_tokens)
