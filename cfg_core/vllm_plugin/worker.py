"""GuidedWorker: the platform's own vLLM worker, whose model runner blends."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from cfg_core.processor_registry import Registry
from cfg_core.vllm_plugin import stock_faults
from cfg_core.vllm_plugin.compat import processors_of
from cfg_core.vllm_plugin.sampler import guide
from cfg_core.vllm_plugin.sequence_processors import engine_info

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

PRIVATE_NAMES = (
    "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.shutdown",
    "vllm.v1.worker.gpu_worker:Worker.model_runner",
    "vllm.v1.worker.gpu_worker:Worker.use_v2_model_runner",
)


class GuidedWorker(PlatformWorker):
    """After the model is loaded, and before any graph is captured, the runner learns to blend."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        stock_faults.mend()
        registry = Registry.load(processors_of(self.vllm_config), engine_info(self.model_config))
        guide(self.model_runner, registry, v2=self.use_v2_model_runner)

    def shutdown(self) -> None:
        processors = getattr(self.model_runner, "processors", None)
        if processors is not None:
            processors.table.close()
        super().shutdown()
