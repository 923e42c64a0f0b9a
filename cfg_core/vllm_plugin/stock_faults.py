"""Faults of vLLM 0.32 that our users would meet, mended. Each with what it does, and the test that shows it.

Three more are mended where they happen: in sampler.py seeds beside chunked prompts, and steps without drafts; in
remote_queues.py waiting for a lost worker.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

PRIVATE_NAMES = (
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    "vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
    "vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink",
)

_bgmv_shrink = lora_ops.bgmv_shrink


def mend() -> None:
    """In a worker process, before it serves. Idempotent."""
    if current_platform.is_cpu():
        sampler: Any = rejection_sampler
        sampler.expand_batch_to_tokens = expand_batch_to_tokens
        for module in (lora_ops, punica_cpu):
            module.bgmv_shrink = bgmv_shrink


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """`x` [batch], each value repeated for its request's drafts -> [drafts]; `replace_from` becomes `replace_to`.

    vLLM's CPU kernel writes into a converted copy of its output, which is lost: under speculation, temperature, top-k
    and top-p of sampled requests are whatever the memory held (tests/contract/test_stock_faults.py).
    """
    values = torch.where(x == replace_from, replace_to, x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts, output_size=num_tokens)


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """The first half of a LoRA product, into `output` [tokens, rank]; nothing for tokens without an adapter (-1).

    vLLM's takes -1 for the last adapter, so that on a CPU requests without one, in a batch with others that have
    one, are answered by the adapter (tests/contract/test_stock_faults.py).
    """
    _bgmv_shrink(inputs, lora_weights, output, adapters, scaling)
    output[adapters < 0] = 0
