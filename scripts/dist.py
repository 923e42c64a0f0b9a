"""Build the wheel and the sdist into dist/, with the setuptools of .venv and without network.

    python scripts/dist.py [FOLDER]          `make dist` runs it

Both are built from a copy, so that no build folder stays in the checkout. Of the copy, setuptools
takes the modules, and the files that pyproject.toml names.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IN_THE_COPY = ("LICENSE", "README.md", "pyproject.toml", "cfg_core", "cfg_serve", "deployments")
LINKED = ("configs/serve.env",)
"""What links inside the packages lead to."""

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
"""In a process for each, because setuptools keeps the command line of the first."""


def files() -> Iterator[Path]:
    """What may get into them, relative to the checkout, which may be one without git."""
    for name in (*IN_THE_COPY, *LINKED):
        path = ROOT / name
        below = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in below:
            if file.is_file() and "__pycache__" not in file.parts:
                yield file.relative_to(ROOT)


def build(folder: Path) -> list[Path]:
    """Build both; returns their paths. Raises CalledProcessError if setuptools fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cfg-serve-dist-") as copy:
        for file in files():
            target = Path(copy) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, target)  # follows links: a package has the file itself
        for kind in ("sdist", "wheel"):
            _run([sys.executable, "-c", BUILD.format(kind), str(folder.resolve())], Path(copy))
    return sorted(folder.glob("cfg_serve-*"))


def _run(command: list[str], cwd: Path) -> None:
    """Its output is shown only if it fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)


if __name__ == "__main__":
    for path in build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"):
        print(path)
