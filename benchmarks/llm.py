"""vLLM's engine with the plugin in this process, on the models of this repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import ROOT

CHAT = ROOT / "models" / "SmolLM2-135M-Instruct"
STORIES = ROOT / "models" / "stories"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""For an engine on the CPU, in the process that asks it."""


def set_environment(**more: str) -> None:
    """Set ENVIRONMENT and `more`, unless they are set. Call it before torch is imported."""
    for name, value in {**ENVIRONMENT, **more}.items():
        os.environ.setdefault(name, value)


def guided_llm(
    model: Path,
    *,
    dtype: str = "float32",
    mib: int = 512,
    draft_cost: float | None = None,
    guided: bool = True,
    **options: Any,
) -> Any:
    """vLLM's LLM, eager, with a KV pool of so many MiB. guided: with the plugin."""
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    defaults: dict[str, Any] = {"max_num_seqs": 64, "enforce_eager": True}
    plugin = guided_engine_args(draft_cost=draft_cost) if guided else {}
    pool = {"kv_cache_memory_bytes": mib << 20}
    return LLM(str(model), dtype=dtype, **{**defaults, **pool, **options}, **plugin)


@contextmanager
def peak_blocks(scheduler: Any) -> Iterator[Callable[[], int]]:
    """`peak()` is the most KV blocks that were taken after any step since."""
    pool, schedule, peaks = scheduler.kv_cache_manager.block_pool, scheduler.schedule, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        peaks.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one is the null block
        return step

    scheduler.schedule = counted
    try:
        yield lambda: max(peaks)
    finally:
        del scheduler.schedule


def guidance(scale: float, negative: Sequence[int]) -> dict[str, Any]:
    """The guidance fields of a request."""
    return {"guidance_scale": scale, "negative_prompt_token_ids": list(negative)}


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """A conversation as a chat model reads it, up to the answer."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
