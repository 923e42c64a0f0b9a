"""Engines that cannot guide: they serve plain requests as stock vLLM, and refuse guided ones.

The sentence says which option is in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cfg_core.errors import CompatibilityError
from cfg_core.vllm_plugin.core.scheduler import GuidedScheduler
from cfg_core.vllm_plugin.worker.cpu_worker import GuidedCPUWorker, check_experts
from tests.engine.engines import ROOMY, Engine, guided, plain, tokens
from tests.engine.oracle import CASES, PROMPTS

pytestmark = pytest.mark.slow


def connector(folder: Path) -> dict[str, Any]:
    """A KV connector of vLLM that keeps blocks in files."""
    place = {"shared_storage_path": str(folder)}
    name = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**name, "kv_connector_extra_config": place}}


def test_plain_requests_are_served_and_guided_ones_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    told = r"plain requests only: .* KV connectors \(remove kv_transfer_config\)"
    engine = Engine(model_folder("llama"), **ROOMY, **connector(tmp_path / "ours"))
    try:
        assert isinstance(engine.scheduler, GuidedScheduler)
        with pytest.raises(ValueError, match=told):
            engine.generate([CASES[0].prompt], [guided(CASES[0])])
        ours = tokens(engine.generate(PROMPTS, [plain() for _ in PROMPTS]))
    finally:
        engine.close()
    stock = Engine(model_folder("llama"), guided=False, **ROOMY, **connector(tmp_path / "stock"))
    try:
        assert tokens(stock.generate(PROMPTS, [plain() for _ in PROMPTS])) == ours
    finally:
        stock.close()


def test_an_engine_with_one_slot_serves_plain_requests(
    model_folder: Callable[[str], Path], llama: Any
) -> None:
    engine = Engine(model_folder("llama"), **{**ROOMY, "max_num_seqs": 1})
    try:
        with pytest.raises(ValueError, match=r"has 2 streams, and a step .* has 1 places"):
            engine.generate([CASES[0].prompt], [guided(CASES[0])])
        assert tokens(engine.generate(PROMPTS, [plain() for _ in PROMPTS])) == llama.plain
    finally:
        engine.close()


def parallel(is_moe: bool = True, **given: Any) -> Any:
    """What `check_experts` reads of vLLM's configuration."""
    alone = {"enable_expert_parallel": False, "world_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=is_moe),
        parallel_config=SimpleNamespace(**{**alone, **given}),
    )


@pytest.mark.parametrize(
    "given", [{"enable_expert_parallel": True, "world_size": 2}, {"data_parallel_size": 2}]
)
def test_a_cpu_refuses_to_spread_experts_at_start(given: dict[str, Any]) -> None:
    """vLLM's own engine would die at its first step, or read other memory for an expert."""
    worker = GuidedCPUWorker.__new__(GuidedCPUWorker)
    worker.vllm_config = parallel(**given)
    told = "vLLM's CPU build cannot spread .* use tensor_parallel_size without"
    with pytest.raises(CompatibilityError, match=told):
        worker.init_device()
    check_experts(parallel(is_moe=False, **given))
    check_experts(parallel(world_size=2))
