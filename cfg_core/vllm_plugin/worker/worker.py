"""GuidedWorker: the platform's own vLLM worker, with a guided model runner.

vLLM imports this module in each worker process, by the name in `guided_engine_args`.
"""

from __future__ import annotations

from vllm.platforms import current_platform

from cfg_core.errors import CompatibilityError

if current_platform.is_cpu():
    from cfg_core.vllm_plugin.worker.cpu_worker import GuidedCPUWorker as GuidedWorker
elif current_platform.is_cuda_alike():
    from cfg_core.vllm_plugin.worker.gpu_worker import GuidedGPUWorker as GuidedWorker
else:
    raise CompatibilityError(
        f"cfg-serve has no guided worker for {current_platform.device_name}: "
        "use a CPU, an NVIDIA GPU or an AMD GPU."
    )

__all__ = ["GuidedWorker"]
