"""Rows of tools/architectures are measured again: one of each kind that no other test here has.

`make survey` measures all, and docs/models.md says what was found. Windows, experts, recurrent
states (test_recurrent.py), latent attention (test_mtp.py) and images have tests of their own, and
so have all kinds of heads (test_head.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.architectures import results, table

pytestmark = pytest.mark.slow

NAMES = (
    "BloomForCausalLM",  # alibi
    "GptOssForCausalLM",  # sinks, with windows and experts
    "compressed-tensors w8a8, int8",  # quantised
)
LIMIT_S = 900
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of NAMES, from one process that starts one for each."""
    path = tmp_path_factory.mktemp("architectures") / "results.jsonl"
    command = [sys.executable, "-m", "tools.architectures", "--results", str(path), *NAMES]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return results.load(path)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", NAMES)
def test_guided_text_is_the_oracles(measured: dict[str, dict[str, Any]], name: str) -> None:
    found = measured[name]
    (row,) = (row for row in table.ROWS if row.label == name)
    assert found["outcome"] == "equal", found
    assert found["oracle"] == row.oracle


def test_the_pages_cases_are_counted() -> None:
    from tools.architectures.reference_model import SOME_CASES

    assert len(SOME_CASES) == results.NUM_CASES
