"""What contract tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.left_out import RUNS_RAY_LLM
from tests.support.warm_process import WarmProcess

collect_ignore = [] if RUNS_RAY_LLM else ["test_ray_llm.py"]


@pytest.fixture(scope="session")
def warm_process() -> Iterator[WarmProcess]:
    with WarmProcess() as process:
        yield process
