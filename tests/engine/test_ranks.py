"""Engines of several ranks: data parallelism, and experts that are spread over processes.

Each engine's tokens must be those of Hugging Face, guided and plain. A group's streams are made
in the engine process that its leader was sent to, so they are always on one rank. Ranks of a dense
model do not know of each other. Those of a mixture of experts step together: a rank without work
computes an empty step, and how many tokens each has is different in each step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paths
import pytest
from oracle import CASES, MIN_MARGIN, Oracle
from ranks_program import ALONE, EVERY, IDLE

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIMIT_S = 300
MENDED: dict[str, Any] = {"worker_extension_cls": "experts_cpu.WorkerExtension"}
"""vLLM's CPU build cannot spread experts; tests/support/experts_cpu can."""
TWO_PROCESSES: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enable_expert_parallel": True,
}
RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama DP2": ("llama", {"data_parallel_size": 2}),
    "experts TP2 EP": ("qwen3_moe", {**TWO_PROCESSES, **MENDED}),
    "experts DP2": ("qwen3_moe", {"data_parallel_size": 2, **MENDED}),
    "experts DP2 EP, prompts in every third step": (
        "qwen3_moe",
        {
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "prefill_schedule_interval": 3,
            **MENDED,
        },
    ),
}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}
"""The draft model is the model itself."""


def run(folder: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(paths.SUPPORT / "experts_cpu"), *filter(None, given)]
    return subprocess.run(
        [sys.executable, "ranks_program.py", str(folder), json.dumps(options)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def check(report: dict[str, Any], oracle: Oracle, options: dict[str, Any]) -> None:
    """Assert that the report has the oracle's tokens, and that nothing is left on any rank."""
    ranks = options.get("data_parallel_size", 1)
    assert report["ranks"] == ranks == len(report["stats"])
    assert report["experts_are_spread"] == options.get("enable_expert_parallel", False)
    assert report["guided"] == oracle.guided[::EVERY]
    assert report["alone"] == oracle.guided[: len(ALONE)]
    assert report["plain"] == report["again"] == oracle.plain
    assert report["in_flight"] == 0
    for stats in report["stats"]:
        assert stats["groups_admitted"] > 0  # vLLM sent groups to every rank
        assert not any(stats[key] for key in IDLE)
    groups = len(CASES[::EVERY]) + len(ALONE) + 1
    assert sum(stats["groups_admitted"] for stats in report["stats"]) == groups


@pytest.mark.parametrize("name", RANKS)
def test_tokens_are_those_of_the_reference(name, model_folder, oracle_of):
    model, options = RANKS[name]
    oracle = oracle_of(model)
    assert oracle.margin > MIN_MARGIN
    done = run(model_folder(model), options)
    assert done.returncode == 0, paths.cause(done.stderr)
    report = json.loads(done.stdout)
    check(report, oracle, options)
    assert sum(stats["group_preemptions"] for stats in report["stats"]) > 0


def test_ranks_that_share_experts_draft_equally_often(model_folder, oracle_of):
    """Groups that back off would have the drafter of their rank make fewer drafts than that of the
    other rank, and then each would wait for the other."""
    folder = model_folder("qwen3_moe")
    options = {
        "data_parallel_size": 2,
        "speculative_config": {**DRAFTS, "model": str(folder)},
        "max_num_batched_tokens": 64,
        "draft_cost": 5.0,
        **MENDED,
    }
    done = run(folder, options)
    assert done.returncode == 0, paths.cause(done.stderr)
    check(json.loads(done.stdout), oracle_of("qwen3_moe"), options)


@pytest.mark.parametrize("options", [TWO_PROCESSES, {"data_parallel_size": 2}], ids=["EP", "DP"])
def test_a_cpu_refuses_to_spread_experts_at_start(options, model_folder):
    """vLLM's own engine would die at its first step, or read other memory for an expert."""
    done = run(model_folder("qwen3_moe"), options)
    assert done.returncode != 0
    assert "vLLM's CPU build cannot spread a model's experts over processes" in done.stderr
    assert "use tensor_parallel_size without enable_expert_parallel" in done.stderr
