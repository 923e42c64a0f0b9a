"""The guided worker of CUDA and ROCm GPUs."""

from __future__ import annotations

from typing_extensions import override
from vllm.v1.worker.gpu_worker import Worker

from cfg_core.vllm_plugin.processor_registry import registry_of
from cfg_core.vllm_plugin.worker.v1 import GuidedRunnerV1
from cfg_core.vllm_plugin.worker.v2 import GuidedRunnerV2


class GuidedGPUWorker(Worker):
    """vLLM's GPU worker with a guided model runner."""

    model_runner: GuidedRunnerV1 | GuidedRunnerV2

    @override
    def _make_model_runner(self) -> GuidedRunnerV1 | GuidedRunnerV2:
        """Make a guided model runner. vLLM provides this method for subclasses to override."""
        cls = GuidedRunnerV2 if self.use_v2_model_runner else GuidedRunnerV1
        runner: GuidedRunnerV1 | GuidedRunnerV2 = cls(self.vllm_config, self.device)
        runner.prepare(registry_of(self.vllm_config))
        return runner

    @override
    def shutdown(self) -> None:
        """Close the logits processors, then call vLLM's method."""
        processors = getattr(getattr(self, "model_runner", None), "processors", None)
        if processors is not None:
            processors.close()
        super().shutdown()
