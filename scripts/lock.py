"""Compile requirements/*.in into the pinned lists beside them.

    python scripts/lock.py [NAME ...]     `make lock` runs it for all lists; NAME is like cuda-0.33

It needs a package index. A new version of vLLM needs an .in file for each device that has a build,
and no change here.

uv compiles the lists, for every Python version and platform at once. It is taken from the PATH, or
else installed into .venv. torch's CPU build is not on the default package index, so for every list
but those for CUDA uv also searches pip's find-links folders and TORCH_INDEX. The CPU build must not
get into the lists for CUDA. A list is compiled with its own overrides, if it has some, and a
runtime list also with those of its device. What the newest list for CPUs pins is not pinned again
in dev.txt, oracle.txt and clients.txt.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from lists import REQUIREMENTS, SHARED, is_runtime, newest, runtime_lists

COMPILE = "pip compile -q --universal --python-version 3.11 --no-annotate --no-header"
HEADERS = {
    "cpu": "Everything for a machine without a GPU, in the versions that the tests run with.",
    "cuda": (
        "Everything for a machine with an NVIDIA GPU. Installed without one, and never run on one."
    ),
    "dev": "What tests and checks need in addition to the runtime.",
    "oracle": "What tests compare this project with, installed into .venv/oracle.",
    "clients": "What examples/ need in addition to the runtime, installed into .venv/clients.",
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


def options(name: str) -> list[str]:
    """What uv is told about a list: its overrides, or the list that it goes with."""
    device = name.split("-")[0]
    overrides = dict.fromkeys((f"overrides-{device}.in", f"overrides-{name}.in"))
    found = [word for x in overrides if (REQUIREMENTS / x).exists() for word in ("--override", x)]
    if not is_runtime(name):
        return [*found, "--constraint", f"{newest('cpu')}.txt", *cpu_wheels()]
    return found if device == "cuda" else found + cpu_wheels()


def installed_before(name: str) -> frozenset[str]:
    """Names that a list leaves out, because another list has them.

    The shared lists go with every runtime list, whatever version it pins, and oracle.txt and
    clients.txt go with dev.txt. Packages that these have for Windows alone do not count.
    """
    if is_runtime(name):
        return frozenset()
    others = [f"{newest('cpu')}.txt", *["dev.txt"] * (name != "dev")]
    lines = [line for file in others for line in (REQUIREMENTS / file).read_text().splitlines()]
    return frozenset(x.split("==")[0] for x in lines if "sys_platform == 'win32'" not in x)


def without(pins: str, names: frozenset[str]) -> str:
    """`pins` without those of `names`, and without those that an override excludes for good."""
    lines = pins.splitlines(keepends=True)
    return "".join(
        x for x in lines if x.split("==")[0] not in names and "sys_platform == 'never'" not in x
    )


def header(name: str) -> str:
    return (
        f"# {HEADERS[name.split('-')[0]]}\n# Made from {name}.in by `make lock`; installed with"
        " `pip install --no-deps`.\n"
    )


def compile_list(name: str) -> None:
    command = [uv(), *shlex.split(COMPILE), *options(name), f"{name}.in"]
    pins = subprocess.run(
        command, cwd=REQUIREMENTS, check=True, capture_output=True, text=True
    ).stdout
    pins = without(pins, installed_before(name))
    (REQUIREMENTS / f"{name}.txt").write_text(header(name) + pins)
    print(f"requirements/{name}.txt: {len(pins.splitlines())} pins")


if __name__ == "__main__":
    # The runtime lists come first, because the shared ones are compiled against one of them.
    for each in sys.argv[1:] or [*runtime_lists(".in"), *SHARED]:
        compile_list(each)
