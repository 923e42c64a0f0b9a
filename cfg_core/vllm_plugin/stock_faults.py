"""Faults of vLLM 0.32 that our users would meet, mended. Each with what it does, and the test that shows it.

Two more are mended where they happen, in sampler.py: seeds beside chunked prompts, and steps without drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

PRIVATE_NAMES = ("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",)


def mend() -> None:
    """In a worker process, before it serves. Idempotent."""
    if current_platform.is_cpu():
        module: Any = rejection_sampler
        module.expand_batch_to_tokens = expand_batch_to_tokens


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
