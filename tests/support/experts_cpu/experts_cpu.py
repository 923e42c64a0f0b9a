"""Test support: experts that are spread over CPU processes, which vLLM's CPU build cannot do.

vLLM's CPU communicator cannot exchange batches of different sizes, and its kernel of experts takes
the number of an expert for its place in this process. Both are mended here, so that engines whose
ranks step together (data parallelism and expert parallelism of a mixture of experts) run on CPUs.
Name `experts_cpu.WorkerExtension` as `worker_extension_cls`: vLLM imports it in each worker before
it makes the worker.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    from mrv2_cpu import WorkerExtension as _Base  # in the folder next to this one
else:
    _Base = object


class WorkerExtension(_Base):
    """What Model Runner V2 needs on a CPU, if the worker uses it."""


def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, in their order. Rank r has sizes[r] of them; None: all have as many.

    given: a tensor, or a list of tensors.
    """
    assert dim == 0
    if isinstance(given, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in given]
    counts = sizes or [len(given)] * self.world_size
    padded = given.new_zeros(max(counts), *given.shape[1:])
    padded[: len(given)] = given
    gathered = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def reduce_scatterv(
    self: Any, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' `given`. See all_gatherv."""
    assert dim == 0
    counts = sizes or [len(given) // self.world_size] * self.world_size
    total = given.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(counts)[self.rank_in_group]


def with_expert_map(stock: Any) -> Any:
    """`CPUUnquantizedExperts.apply`, which finds the place of an expert in `expert_map`.

    An expert of another process has the place -1; it counts nothing here.
    """

    def apply(self: Any, *args: Any, **named: Any) -> None:
        expert_map = named.get("expert_map")
        if expert_map is not None:
            places = expert_map[named["topk_ids"].long()]
            named["topk_weights"] = named["topk_weights"].masked_fill(places < 0, 0.0)
            named["topk_ids"] = places.clamp(min=0).to(named["topk_ids"].dtype)
        stock(self, *args, **named)

    return apply


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
CPUUnquantizedExperts.apply = with_expert_map(CPUUnquantizedExperts.apply)
