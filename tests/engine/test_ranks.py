"""Engines of several ranks: data parallelism, and experts that are spread over processes.

Each engine's tokens must be those of Hugging Face, guided and plain. A group's streams are made
in the engine process that its leader was sent to, so they are always on one rank. Ranks of a dense
model do not know of each other. Those of a mixture of experts step together: a rank without work
computes an empty step, and how many tokens each has is different in each step. That vLLM's CPU
build is refused to spread experts is shown in test_plain_engines.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import paths
from tests.engine.chosen import chosen
from tests.engine.oracle import CASES, MIN_MARGIN, NEW_TOKENS, Oracle
from tests.engine.ranks_program import ALONE, EVERY, IDLE

pytestmark = pytest.mark.slow

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


def run(
    folder: Path,
    options: dict[str, Any],
    environment: dict[str, str] | None = None,
    new_tokens: int = NEW_TOKENS,
) -> subprocess.CompletedProcess[str]:
    program = ("-m", "tests.engine.ranks_program")
    given = environment or dict(os.environ)
    places = [str(paths.SUPPORT / "experts_cpu"), *filter(None, [given.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *program, str(folder), json.dumps(options), str(new_tokens)],
        cwd=paths.ROOT,
        env={**given, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def check(
    report: dict[str, Any], oracle: Oracle, options: dict[str, Any], new_tokens: int = NEW_TOKENS
) -> None:
    """Assert that the report has the oracle's tokens, and that nothing is left on any rank."""
    ranks = options.get("data_parallel_size", 1)
    assert report["ranks"] == ranks == len(report["stats"])
    assert report["experts_are_spread"] == options.get("enable_expert_parallel", False)
    guided = [text[:new_tokens] for text in oracle.guided]
    assert report["guided"] == guided[::EVERY]
    assert report["alone"] == guided[: len(ALONE)]
    assert report["plain"] == report["again"] == [text[:new_tokens] for text in oracle.plain]
    assert report["in_flight"] == 0
    for stats in report["stats"]:
        assert stats["groups_admitted"] > 0  # vLLM sent groups to every rank
        assert not any(stats[key] for key in IDLE)
    groups = len(CASES[::EVERY]) + len(ALONE) + 1
    assert sum(stats["groups_admitted"] for stats in report["stats"]) == groups


@pytest.mark.parametrize("name", chosen(list(RANKS), ()))
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


def test_the_path_of_gpus(model_folder, oracle_of):
    """Model Runner V2 with async scheduling, in Triton's interpreter."""
    (path,) = [path for path in paths.PATHS if path.name == "V2 async TP1"]
    options = {"data_parallel_size": 2, "enable_expert_parallel": True, **MENDED}
    environment = paths.environment(path)
    done = run(model_folder("qwen3_moe"), options, environment, path.new_tokens)
    assert done.returncode == 0, paths.cause(done.stderr)
    report = json.loads(done.stdout)
    assert report["v2"]
    assert report["async"]
    check(report, oracle_of("qwen3_moe"), options, path.new_tokens)
