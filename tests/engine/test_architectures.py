"""A dozen of the table's rows, of different kinds, are measured again.

The others are measured by hand (architectures/run.py), and docs/models.md says what was found.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.architectures import results, run, table

pytestmark = pytest.mark.slow

NAMES = (
    "BloomForCausalLM",  # alibi, a tied head
    "Cohere2ForCausalLM",  # windows, a scaled head
    "GPTJForCausalLM",  # a head with a bias
    "MixtralForCausalLM",
    "GptOssForCausalLM",  # experts, windows, sinks
    "DeepseekV3ForCausalLM",  # latent attention
    "MiniCPMForCausalLM",  # a stand-in for a config of remote code, drawn weights
    "Mamba2ForCausalLM",  # nothing but recurrent states
    "FalconH1ForCausalLM",  # states and attention in one layer
    "Qwen3_5ForCausalLM",  # linear attention, bfloat16
    "LlavaForConditionalGeneration",
    "compressed-tensors w8a8, int8",
)
LIMIT_S = 900
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of NAMES, from one process that starts one for each."""
    path = tmp_path_factory.mktemp("architectures") / "results.jsonl"
    command = [sys.executable, "-m", run.__name__, "--results", str(path), *NAMES]
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
    assert Path(run.__file__).is_file()
