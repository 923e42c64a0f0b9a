"""A mended fault of vLLM's Mamba2 layers on CPUs (see patches.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm
from vllm.v1.kv_cache_interface import MambaSpec


def make_get_kv_cache_spec(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `MambaMixer2.get_kv_cache_spec`.

    vLLM says that the layer can save its state inside of a chunk. Its CPU kernel returns only the
    last state of a chunk, so the first prompt that fills a block would end the engine, if prefix
    caching is on. Without that promise, the scheduler ends a chunk where a state is cached.
    """

    def get_kv_cache_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = stock(self, *args, **kwargs)
        if not isinstance(spec, MambaSpec):
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    return get_kv_cache_spec


def returns_last_state_only(_stock: Callable[..., Any]) -> bool:
    """Whether vLLM's CPU kernel returns one state for two chunks of one sequence."""
    tokens, ends = torch.zeros(2, 1, 1), torch.tensor([0, 1, 2], dtype=torch.int32)
    states = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu(
        tokens,
        torch.zeros(2, 1),
        torch.zeros(1),
        tokens,
        tokens,
        1,
        torch.zeros_like(tokens),
        cu_seqlens=ends[::2].contiguous(),
        cu_chunk_seqlens=ends,
        last_chunk_indices=torch.tensor([1]),
        return_intermediate_states=True,
    )
    return len(states) == 1
