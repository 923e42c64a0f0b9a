"""The guided worker of CUDA and ROCm GPUs."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.v1.worker.gpu_worker import Worker

from cfg_core.vllm_plugin.config import cannot_guide
from cfg_core.vllm_plugin.processor_registry import registry_of
from cfg_core.vllm_plugin.worker.processors import close_processors
from cfg_core.vllm_plugin.worker.v1 import GuidedRunnerV1
from cfg_core.vllm_plugin.worker.v2 import GuidedRunnerV2


class GuidedGPUWorker(Worker):
    """vLLM's GPU worker with a guided model runner."""

    @override
    def _make_model_runner(self) -> Any:
        """Make a guided model runner. An engine that cannot guide has vLLM's own."""
        if cannot_guide(self.vllm_config) is not None:
            return super()._make_model_runner()
        cls = GuidedRunnerV2 if self.use_v2_model_runner else GuidedRunnerV1
        runner = cls(self.vllm_config, self.device)
        runner.prepare(registry_of(self.vllm_config))
        return runner

    @override
    def shutdown(self) -> None:
        close_processors(self)
        super().shutdown()
