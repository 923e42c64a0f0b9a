"""A guided step on a GPU never makes the host wait for the device where a plain one does not.

CUDA's debug mode counts what waits: copies to the host, `.item()`, `nonzero` and the like.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.gpu.gpu_models import make_llama

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STEPS = 12
BATCH = 4


def waits(engine: Any, requests: list[dict[str, Any]], name: str) -> int:
    """How often `STEPS` decode steps of these requests wait for the device."""
    import torch
    from vllm import SamplingParams

    for place, fields in enumerate(requests):
        params = SamplingParams(max_tokens=STEPS + 20, ignore_eos=True, detokenize=False, **fields)
        prompt = {"prompt_token_ids": [7 + place, 8, 9, 10]}
        engine.add_request(f"{name}-{place}", prompt, params)
    for _ in range(8):  # prompts, and what is made once
        engine.step()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [f"{w.filename}:{w.lineno}" for w in seen if "synchron" in str(w.message)]
    print(name, len(found), sorted(set(found)))
    while engine.has_unfinished_requests():
        engine.step()
    return len(found)


GUIDED = {"guidance_scale": 1.5, "negative_prompt_token_ids": [5, 6]}
LOADS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "logprobs": {"temperature": 0.8, "logprobs": 2},
    "penalty": {"temperature": 0.0, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("runner", ["2", "1"])
def test_guided_steps_do_not_wait(runner, tmp_path, monkeypatch):
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "2" else "0")
    engine = LLM(
        str(make_llama(tmp_path)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
        max_num_seqs=16,
        cudagraph_capture_sizes=[1, 2, 4, 8, 16],
        **guided_engine_args(),
    ).llm_engine
    found = {}
    for name, fields in LOADS.items():
        plain = waits(engine, [fields] * (2 * BATCH), f"plain {name}")
        extra = {**GUIDED, "guidance_logprobs": True} if name == "logprobs" else GUIDED
        guided = waits(engine, [{**fields, "extra_args": extra}] * BATCH, f"guided {name}")
        found[name] = (plain, guided)
    engine.engine_core.shutdown()
    assert all(guided <= plain for plain, guided in found.values()), found
