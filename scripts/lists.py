"""The pinned lists in requirements/: which there are.

A runtime list is named after a device and a minor version of vLLM, such as cuda-0.33.txt. The files
say which versions can be installed. No other place repeats it. dev.txt, oracle.txt and clients.txt
go with every runtime list.

Only the standard library is used, because scripts/setup.py asks before anything is installed.
"""

from __future__ import annotations

import re
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
DEVICES = ("cpu", "cuda")
SHARED = ("dev", "oracle", "clients")
RUNTIME = re.compile(r"(cpu|cuda)-\d+\.\d+")


def runtime_lists(suffix: str = ".txt") -> list[str]:
    """Names of the runtime lists without their suffix, by device, the oldest version first."""
    names = (path.name[: -len(suffix)] for path in REQUIREMENTS.glob(f"*{suffix}"))
    return sorted(filter(is_runtime, names), key=by_device_and_version)


def is_runtime(name: str) -> bool:
    return RUNTIME.fullmatch(name) is not None


def by_device_and_version(name: str) -> tuple[str, list[int]]:
    device, vllm = name.split("-")
    return device, [int(number) for number in vllm.split(".")]


def versions(device: str) -> list[str]:
    """Minor versions of vLLM that have a list for `device`, the oldest first."""
    return [name.split("-")[1] for name in runtime_lists() if name.startswith(f"{device}-")]


def newest(device: str) -> str:
    """Name of the list for `device` with the newest vLLM."""
    return f"{device}-{versions(device)[-1]}"
