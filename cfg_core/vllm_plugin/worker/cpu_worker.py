"""The guided worker of CPUs, and patches for faults of vLLM on CPUs.

The faults patched here are those that our users would meet (see patches.py). Two more are avoided
in v1.py: seeds of requests with chunked prompts, and speculation in steps without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker

from cfg_core.errors import CompatibilityError
from cfg_core.vllm_plugin import patches
from cfg_core.vllm_plugin.config import cannot_guide
from cfg_core.vllm_plugin.processor_registry import registry_of
from cfg_core.vllm_plugin.worker.v1 import GuidedCPURunnerV1
from cfg_core.vllm_plugin.worker.v2 import GuidedCPURunnerV2


class GuidedCPUWorker(CPUWorker):
    """vLLM's CPU worker with a guided model runner."""

    model_runner: GuidedCPURunnerV1 | GuidedCPURunnerV2

    @override
    def init_device(self) -> None:
        """Call vLLM's method, then replace the class of the model runner.

        vLLM's method makes the runner itself, and there is no hook to choose its class. An engine
        that cannot guide keeps vLLM's own.
        Raises CompatibilityError if this vLLM cannot spread the model's experts.
        """
        check_experts(self.vllm_config)
        patches.apply("worker (CPU)")
        super().init_device()
        if cannot_guide(self.vllm_config) is not None:
            return
        cls = GuidedCPURunnerV2 if self.use_v2_model_runner else GuidedCPURunnerV1
        self.model_runner.__class__ = cls
        self.model_runner.prepare(registry_of(self.vllm_config))

    @override
    def shutdown(self) -> None:
        """Close the logits processors, then call vLLM's method."""
        processors = getattr(getattr(self, "model_runner", None), "processors", None)
        if processors is not None:
            processors.close()
        super().shutdown()


def check_experts(config: VllmConfig) -> None:
    """Refuse experts that are spread over processes, which vLLM's CPU build cannot do.

    With data parallelism it dies at its first step, because its processes cannot exchange batches
    of different sizes. With expert parallelism its kernel takes the number of an expert for its
    place in this process, and reads other memory. Raises CompatibilityError.
    """
    if not config.model_config.is_moe or not _cannot_exchange_batches():
        return
    parallel = config.parallel_config
    spreads = parallel.enable_expert_parallel and parallel.world_size > 1
    if spreads or parallel.data_parallel_size > 1:
        raise CompatibilityError(
            "vLLM's CPU build cannot spread a model's experts over processes: use"
            " tensor_parallel_size without enable_expert_parallel and data_parallel_size, or a GPU."
        )


def _cannot_exchange_batches() -> bool:
    return CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv


def make_expand_batch_to_tokens(_stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces `rejection_sampler.expand_batch_to_tokens`.

    vLLM's CPU kernel writes into a converted copy of its output, and the copy is lost.
    """
    return expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each value of `x` [batch] for each draft of its request. Returns [drafts].

    cu_num_tokens: [batch], the number of drafts up to and including each request's.
    num_tokens: the number of all drafts.

    Values equal to `replace_from` become `replace_to`.
    """
    values = torch.where(x == replace_from, replace_to, x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts, output_size=num_tokens)


def make_bgmv_shrink(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `bgmv_shrink`, the first half of a LoRA product, [tokens, rank].

    vLLM's function takes the index -1 (no adapter) for the last adapter. On a CPU, a request
    without an adapter is therefore computed with that adapter if other requests of its batch have
    one.
    """

    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        stock(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[lora_indices_tensor < 0] = 0

    return bgmv_shrink


def takes_last_adapter(stock: Callable[..., None]) -> bool:
    """Whether `stock`, vLLM's bgmv_shrink, takes the index -1 for the last adapter."""
    output = torch.zeros(1, 1)
    stock(torch.ones(1, 1), torch.ones(1, 1, 1, 1), output, torch.tensor([-1]), 1.0)
    return bool(output.any())
