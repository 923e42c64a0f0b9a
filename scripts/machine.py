"""What this machine has: platform, free disk space, GPU and Python interpreters.

Only the standard library is used, because scripts/setup.py asks before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

OLDEST, TOO_NEW = (3, 11), (3, 15)
CANDIDATES = ("python3", "python3.11", "python3.12", "python3.13", "python3.14")
FREE_GB = {"cpu": 6, "cpu, with the CUDA build of torch": 10, "cuda": 20}


class SetupError(Exception):
    """A problem that only the user can solve. The message says what it is, and what to do."""


def check_platform() -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"vLLM has wheels for Linux on x86-64 and aarch64 only; this is {system} on {machine}. "
            "Run it in a Linux container or on a Linux machine."
        )


def check_disk(folder: Path, kind: str) -> None:
    """Raise SetupError if `folder` lacks the space that `kind`, a key of FREE_GB, needs."""
    free, need = shutil.disk_usage(str(folder)).free / 1e9, FREE_GB[kind]
    if free < need:
        raise SetupError(
            f"{free:.1f} GB are free here and about {need} GB are needed ({kind}). "
            "Make room, or put the checkout on a larger disk."
        )


def asked_device() -> str:
    """$CFG_SERVE_DEVICE: cpu, cuda, or nothing."""
    wanted = os.environ.get("CFG_SERVE_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise SetupError(f"CFG_SERVE_DEVICE is {wanted!r}: set it to cpu or cuda, or leave it out.")
    return wanted


def detect_device() -> str:
    """cpu or cuda: it is cuda if the driver lists a GPU or has made its device file."""
    return "cuda" if Path("/dev/nvidia0").exists() or driver_lists_gpu() else "cpu"


def driver_lists_gpu() -> bool:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def choose_python() -> tuple[str, str]:
    """Path and full version of the interpreter for .venv.

    It is $PYTHON if that is set, else the first suitable one.
    """
    asked = os.environ.get("PYTHON", "")
    seen = {}
    for name in [asked] if asked else CANDIDATES:
        path = shutil.which(name)
        answer = path and ask_version(path)
        if answer:
            version, base = answer
            seen[name] = ".".join(map(str, version))
            if OLDEST <= version[:2] < TOO_NEW:
                return base, seen[name]
    found = ", ".join(f"{name} is {version}" for name, version in seen.items())
    raise SetupError(
        f"Python 3.{OLDEST[1]} to 3.{TOO_NEW[1] - 1} is needed;"
        f" {found or (asked or 'python3') + ' was not found'}. Install one (for example the"
        " packages python3.12 and python3.12-venv), or name yours: make PYTHON=/path/to/python3.12"
    )


def ask_version(python: str) -> tuple[tuple[int, ...], str] | None:
    """The version and the path of an interpreter; None if it does not run.

    A virtual environment may be the .venv that is about to be remade. For its interpreter, the path
    is that of the interpreter it was made from. Links are resolved, so that each interpreter has
    only one path.
    """
    code = "import os, sys; print(*sys.version_info[:3])\n"
    code += "print(os.path.realpath(getattr(sys, '_base_executable', '') or sys.executable))"
    try:
        out = subprocess.run(
            [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        ).stdout
        version, base = out.decode().splitlines()
        return tuple(int(n) for n in version.split()), base
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
