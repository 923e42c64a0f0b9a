"""Test support: a vLLM platform plugin with which stock RayExecutorV2 runs workers on CPUs.

vLLM's CPU platform refuses Ray; this one is it, but says that its device is Ray's "GPU". Tell Ray
that the machine has as many as there are workers. Installed wherever this folder is on the Python
path (see the dist-info beside it).
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"


def register() -> str:
    """Entry point `vllm.platform_plugins`."""
    return "ray_cpu_platform.RayCpuPlatform"
