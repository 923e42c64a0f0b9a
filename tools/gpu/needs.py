"""What a slice may need, and whether this machine has it."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path


@cache
def num_gpus() -> int:
    """NVIDIA GPUs, counted by a process of its own: looking for one here would use it."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def missing(need: str, rehearse: bool, beside: Mapping[str, Path]) -> str | None:
    """Why a slice cannot run here; None if it can.

    need: a name of NEEDS.
    rehearse: on a CPU, so one GPU is not needed. Two are: nothing stands in for them.
    beside: folders of further versions of vLLM.
    """
    return NEEDS[need](rehearse, beside)


def _gpu(rehearse: bool, beside: Mapping[str, Path]) -> str | None:
    return None if rehearse or num_gpus() else "there is no NVIDIA GPU: rehearse it with --rehearse"


def _two_gpus(rehearse: bool, beside: Mapping[str, Path]) -> str | None:
    found = num_gpus()
    return None if found > 1 else f"needs two NVIDIA GPUs, and there are {found}"


def _ray(rehearse: bool, beside: Mapping[str, Path]) -> str | None:
    return None if importlib.util.find_spec("ray") else "ray is not installed: pack it (wheels.txt)"


def _newer_vllm(rehearse: bool, beside: Mapping[str, Path]) -> str | None:
    if "0.33.0" in beside:
        return None
    here = "make beside VERSION=0.33.0" if rehearse else "run.py pack --vllm 0.33"
    return f"there is no vLLM 0.33.0 here: bring it with `{here}`"


NEEDS: dict[str, Callable[[bool, Mapping[str, Path]], str | None]] = {
    "gpu": _gpu,
    "two gpus": _two_gpus,
    "ray": _ray,
    "vllm 0.33": _newer_vllm,
}
