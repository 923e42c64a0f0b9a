"""Compile requirements/*.in into the pinned lists beside them.

`make lock` runs this script. It needs a package index.

uv compiles the lists, for every Python version and platform at once. It is taken from the PATH, or
else installed into .venv. torch's CPU build is not on the default package index, so for every list
but cuda.txt uv also searches pip's find-links folders and TORCH_INDEX. The CPU build must not get
into cuda.txt. What cpu.txt pins is not pinned again in dev.txt and oracle.txt.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
COMPILE = "pip compile -q --universal --python-version 3.11 --no-annotate --no-header"
LISTS = {
    "cpu": "--override overrides-cpu.in",
    "cuda": "--override overrides-cuda.in",
    "dev": "--constraint cpu.txt",
    "oracle": "--constraint cpu.txt",
}
HEADERS = {
    "cpu": "Everything for a machine without a GPU, in the versions that the tests run with.",
    "cuda": (
        "Everything for a machine with an NVIDIA GPU. Resolved, but not yet installed and run on"
        " one."
    ),
    "dev": "What tests and checks need in addition to the runtime.",
    "oracle": "What tests compare the embedding engine with, installed into .venv/oracle.",
}


def uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if found is None:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:", "uv"],
            check=True,
        )
    return found or str(beside)


def cpu_wheels() -> list[str]:
    """Arguments that tell uv where torch's CPU build may be: TORCH_INDEX and pip's find-links.

    pip's find-links are those of the environment variable, or else of its configuration.
    """
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout
    places = (os.environ.get("PIP_FIND_LINKS") or configured).split()
    index = os.environ.get("TORCH_INDEX")
    extra = ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"] if index else []
    return extra + [word for place in places for word in ("--find-links", place)]


def runtime_names() -> frozenset[str]:
    """Names that cpu.txt pins. dev.txt and oracle.txt leave them out, to fit cuda.txt, too."""
    return frozenset(
        line.split("==")[0] for line in (REQUIREMENTS / "cpu.txt").read_text().splitlines()
    )


def without(pins: str, names: frozenset[str]) -> str:
    """`pins` without those of `names`, and without those that an override excludes for good."""
    lines = pins.splitlines(keepends=True)
    return "".join(
        x for x in lines if x.split("==")[0] not in names and "sys_platform == 'never'" not in x
    )


def compile_list(name: str) -> None:
    extra = [] if name == "cuda" else cpu_wheels()
    command = [uv(), *shlex.split(COMPILE), *extra, *shlex.split(LISTS[name]), f"{name}.in"]
    pins = subprocess.run(
        command, cwd=REQUIREMENTS, check=True, capture_output=True, text=True
    ).stdout
    pins = without(pins, runtime_names() if name in ("dev", "oracle") else frozenset())
    header = (
        f"# {HEADERS[name]}\n# Made from {name}.in by `make lock`; installed with `pip install"
        " --no-deps`.\n"
    )
    (REQUIREMENTS / f"{name}.txt").write_text(header + pins)
    print(f"requirements/{name}.txt: {len(pins.splitlines())} pins")


if __name__ == "__main__":
    for each in sys.argv[1:] or LISTS:
        compile_list(each)
