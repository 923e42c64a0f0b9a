"""GuidedWorker: the platform's own vLLM worker, whose model runner blends."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from cfg_core.vllm_plugin.sampler import guide

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

PRIVATE_NAMES = (
    "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.model_runner",
    "vllm.v1.worker.gpu_worker:Worker.use_v2_model_runner",
)


class GuidedWorker(PlatformWorker):
    """After the model is loaded, and before any graph is captured, the runner learns to blend."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        guide(self.model_runner, v2=self.use_v2_model_runner)
