"""Every sampling option under guidance, against the reference loop: see options.py, which has the
table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import options, witness
from tests.engine.engines import ROOMY, Engine
from tests.engine.oracle import Oracle

pytestmark = [pytest.mark.slow, pytest.mark.v2]


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), logits_processors=witness.CONFIG, **ROOMY)
    yield engine
    engine.close()


assert {option.name for option in options.OPTIONS} > options.PART_OF_OTHERS
ROWS = [
    pytest.param(
        option,
        id=option.name,
        marks=pytest.mark.survey_on_v2 if option.name in options.PART_OF_OTHERS else (),
    )
    for option in options.OPTIONS
]


@pytest.mark.parametrize("option", ROWS)
def test_the_text_is_that_of_the_reference(
    engine: Engine, llama: Oracle, option: options.Option
) -> None:
    result = options.compare(engine, llama, option)
    assert result.wrong == []
    assert result.changed or option is options.GREEDY
