"""Compile requirements/*.in into the pinned lists beside them. `make lock` runs it; it needs a
package index.

uv does the compiling (for every Python and platform at once); it is taken from the PATH, or else
installed into .venv. For cpu.txt and dev.txt, uv is also shown the folders in which pip is told to
find wheels, and TORCH_INDEX: torch's CPU build is not on the plain package index, and must not get
into cuda.txt. What the runtime pins is not pinned again in dev.txt.
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
}
HEADERS = {
    "cpu": "Everything for a machine without a GPU, in the versions that the tests run with.",
    "cuda": (
        "Everything for a machine with an NVIDIA GPU. Resolved, but not yet installed and run on"
        " one."
    ),
    "dev": "What tests and checks need beside the runtime.",
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
    """Where torch's CPU build may be: TORCH_INDEX, and pip's find-links (environment variable or
    configuration)."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout
    places = (os.environ.get("PIP_FIND_LINKS") or configured).split()
    index = os.environ.get("TORCH_INDEX")
    extra = ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"] if index else []
    return extra + [word for place in places for word in ("--find-links", place)]


def runtime_names() -> frozenset[str]:
    """What dev.txt need not pin, so that it goes with cpu.txt and with cuda.txt."""
    return frozenset(
        line.split("==")[0] for line in (REQUIREMENTS / "cpu.txt").read_text().splitlines()
    )


def without(pins: str, names: frozenset[str]) -> str:
    """`pins` less those of `names`, and less what an override keeps out for good."""
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
    pins = without(pins, runtime_names() if name == "dev" else frozenset())
    header = (
        f"# {HEADERS[name]}\n# Made from {name}.in by `make lock`; installed with `pip install"
        " --no-deps`.\n"
    )
    (REQUIREMENTS / f"{name}.txt").write_text(header + pins)
    print(f"requirements/{name}.txt: {len(pins.splitlines())} pins")


if __name__ == "__main__":
    for each in sys.argv[1:] or LISTS:
        compile_list(each)
