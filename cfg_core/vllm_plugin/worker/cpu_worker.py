"""The guided worker of CPUs."""

from __future__ import annotations

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker

from cfg_core.errors import CompatibilityError
from cfg_core.vllm_plugin import vllm_patches
from cfg_core.vllm_plugin.config import cannot_guide
from cfg_core.vllm_plugin.processor_registry import registry_of
from cfg_core.vllm_plugin.worker.processors import close_processors
from cfg_core.vllm_plugin.worker.v1 import GuidedCPURunnerV1
from cfg_core.vllm_plugin.worker.v2 import GuidedCPURunnerV2


class GuidedCPUWorker(CPUWorker):
    """vLLM's CPU worker with a guided model runner."""

    model_runner: GuidedCPURunnerV1 | GuidedCPURunnerV2

    @override
    def init_device(self) -> None:
        """Call vLLM's method, then replace the class of the model runner that it made.

        An engine that cannot guide keeps vLLM's own. Raises CompatibilityError if this vLLM cannot
        spread the model's experts.
        """
        check_experts(self.vllm_config)
        vllm_patches.apply("worker (CPU)")
        super().init_device()
        if cannot_guide(self.vllm_config) is not None:
            return
        cls = GuidedCPURunnerV2 if self.use_v2_model_runner else GuidedCPURunnerV1
        self.model_runner.__class__ = cls
        self.model_runner.prepare(registry_of(self.vllm_config))

    @override
    def shutdown(self) -> None:
        close_processors(self)
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
