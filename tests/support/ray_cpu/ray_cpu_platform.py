"""Test support: a vLLM platform plugin with which stock RayExecutorV2 runs workers on CPUs.

vLLM's CPU platform does not support Ray. This plugin is that platform, but names its device Ray's
"GPU". Start Ray with as many GPUs as there are workers. The plugin is installed wherever this
folder is on the Python path (see the dist-info next to it).
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"


def register() -> str:
    """The entry point `vllm.platform_plugins`."""
    return "ray_cpu_platform.RayCpuPlatform"
