"""Make `.venv` with everything that cfg-serve needs, from the pinned lists in requirements/.

Nothing is installed outside of `.venv`. The chat model is put into models/, or into MODEL_CACHE.

    python3 scripts/setup.py [--dev]          `make setup` runs it, and `make test` with --dev

This script uses only the standard library, because it runs before anything is installed. A finished
set-up leaves a stamp in `.venv/setup/`. As long as the stamp matches the requirements, the next run
returns at once. An interrupted set-up leaves a marker there instead, and the next run starts over.
If CFG_SERVE_DEVICE or VLLM is given, device and version are kept in `.venv/setup/`, too, and later
runs need not repeat them. `make clean` forgets them.

    PYTHON=python3.12          which interpreter to use (default: the first suitable one)
    CFG_SERVE_DEVICE=cpu|cuda  instead of looking for an NVIDIA GPU
    VLLM=0.32                  which version of vLLM (default: the newest in requirements/)
    TORCH_INDEX=ADDRESS        index with PyTorch's CPU wheels, if pip is not configured for it
    MODEL_CACHE=DIR            folder outside for the chat model (scripts/chat_model.py)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import chat_model
from choice import Choice, choose, keep
from lists import REQUIREMENTS, SHARED
from machine import SetupError, check_disk, check_platform, choose_python

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STATE = VENV / "setup"  # inside .venv, so that nothing is left elsewhere
STAMP, MARKER = STATE / "stamp.json", STATE / "incomplete"
CHOICE = STATE / "choice.json"  # not in the stamp: an interruption does not make it void
# Folders of their own: requirements/oracle.in and clients.in say why.
ORACLE, CLIENTS = VENV / "oracle", VENV / "clients"
START = time.monotonic()
# --no-compile: few of the 20,000 files are ever imported, and `verify` compiles those. --retries 0:
# if an extra index cannot be reached, each retry costs seconds for every package. --only-binary:
# every pin has a wheel, so nothing needs to be built.
PIP_INSTALL = ("install", "--no-compile", "--retries=0", "--only-binary=:all:")
SMALL_ONE = (
    "For the small one: make clean setup TORCH_INDEX=ADDRESS, with the address of PyTorch's CPU"
    " wheel index from the 'Get started' page of pytorch.org."
)


def say(text: str) -> None:
    print(f"[setup {time.monotonic() - START:4.0f} s] {text}", flush=True)


# ---- what is installed already -------------------------------------------------------------------


def fingerprints(choice: Choice, python: str, version: str) -> dict[str, str]:
    """A digest for each part of a set-up. A part whose digest differs from the stamp is redone."""
    pins = read_pins(choice.runtime).values()
    return {
        "runtime": digest([str(ROOT), choice.device, python, *version.split(".")[:2], *pins]),
        "dev": digest(pin for name in SHARED for pin in read_pins(name).values()),
        "project": digest([(ROOT / "pyproject.toml").read_text()]),
    }


def digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def read_stamp() -> dict[str, str]:
    try:
        stamp: dict[str, str] = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if VENV_PYTHON.exists() and not MARKER.exists() else {}


def remove_stale_venv() -> None:
    """Remove a .venv that is incomplete or out of date. Of a link, only the link is removed.

    Raises SetupError if the .venv was not made by this script.
    """
    if not VENV.exists():
        return
    if not STATE.exists():
        raise SetupError(
            f"{VENV.name} was not made by this set-up. Move it away or remove it, then run this"
            " again."
        )
    reason = "it was interrupted" if MARKER.exists() else "its device, Python or pins changed"
    if VENV.is_symlink():
        say(f"removing the link .venv, and not what it leads to ({reason})")
        VENV.unlink()
        return
    say(f"removing the old .venv ({reason})")
    MARKER.touch()
    for entry in sorted(VENV.iterdir(), key=lambda path: path == STATE):  # the marker goes last
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    VENV.rmdir()


# ---- making it -----------------------------------------------------------------------------------


def check_interpreter(python: str, version: str) -> None:
    if subprocess.run(
        [python, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL
    ).returncode:
        minor = ".".join(version.split(".")[:2])
        raise SetupError(
            f"{python} has no venv module. On Debian and Ubuntu: apt install python{minor}-venv. "
            "Or name another interpreter: make PYTHON=/path/to/python3.12"
        )


def make_venv(python: str, version: str, choice: Choice) -> None:
    say(f"making .venv with Python {version}")
    STATE.mkdir(parents=True)
    MARKER.touch()
    keep(choice, CHOICE)  # now, so that a run after an interruption takes the same
    done = subprocess.run(
        [python, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise SetupError(f"{python} -m venv failed:\n{tail(done.stdout.decode(errors='replace'))}")


def install_runtime(choice: Choice) -> None:
    check_disk(ROOT, choice.device)
    pins = read_pins(choice.runtime)
    if choice.device == "cpu":
        install_cpu_torch(pins.pop("torch"), choice.vllm)
        what = "vLLM, Ray and what they need"
    else:
        # With ==, pip takes torch's CPU build, 2.13.0+cpu, where it is configured to look for that.
        pins["torch"] = pins["torch"].replace("torch==", "torch===")
        what = "vLLM, torch, Ray and what they need (CUDA)"
    lines = STATE / f"{choice.runtime}.txt"
    lines.write_text("\n".join(pins.values()) + "\n")
    pip_install(what, "--no-deps", "-r", str(lines))


def install_cpu_torch(pin: str, vllm: str) -> None:
    """Install torch's CPU build, from TORCH_INDEX or from where pip is configured to look.

    If there is none, the CUDA build is installed, which runs on CPUs, too.
    """
    index = os.environ.get("TORCH_INDEX", "")
    extra = ["--extra-index-url", index] if index else []
    try:
        pip_install(pin, "--no-deps", *extra, pin)
    except PipError as error:
        if not error.not_found:
            raise
        if index:
            raise SetupError(
                f"{pin} is not at TORCH_INDEX={index} for this Python. Correct it or leave it out."
            ) from None
        install_cuda_torch_for_cpu(pin.split("+")[0], vllm)


def install_cuda_torch_for_cpu(pin: str, vllm: str) -> None:
    say(
        "pip finds no CPU build of torch: taking the CUDA build, which runs here too but is 2.5 GB"
        f" larger. {SMALL_ONE}"
    )
    check_disk(ROOT, "cpu, with the CUDA build of torch")
    pins = {**read_pins(f"cuda-{vllm}"), **read_pins(f"cpu-{vllm}")}
    del pins["torch"]
    constraints = STATE / "constraints.txt"
    constraints.write_text("\n".join(pins.values()) + "\n")
    pip_install(f"{pin} and its CUDA libraries", "-c", str(constraints), pin)


def read_pins(name: str) -> dict[str, str]:
    """requirements/NAME.txt as name -> line.

    If a name is pinned twice, with different markers, its value holds both lines.
    """
    pins: dict[str, str] = {}
    for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            package = line.split("==")[0]
            pins[package] = f"{pins[package]}\n{line}" if package in pins else line
    return pins


def install_dev() -> None:
    pip_install("the tools of tests and checks", "--no-deps", "-r", str(REQUIREMENTS / "dev.txt"))
    install_beside(ORACLE, "what the tests compare with")
    install_beside(CLIENTS, "the clients of examples/")


def install_beside(folder: Path, what: str) -> None:
    """Install the list that is named after the folder into it, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    pins = str(REQUIREMENTS / f"{folder.name}.txt")
    pip_install(what, "--target", str(folder), "--no-deps", "-r", pins)


def install_project() -> None:
    """Install this project as editable, with the pinned setuptools, so that no index is needed."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    pip_install("cfg-serve itself (editable)", *offline, "--editable", str(ROOT))


def verify() -> None:
    """Import torch, vLLM and Ray Serve, so that a broken set-up is noticed now.

    The imports also compile the modules, which makes the first start faster.
    """
    say("importing vLLM and Ray Serve once")
    env = dict(
        os.environ, RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    code = "import torch, vllm, ray.serve, vllm.entrypoints.openai.api_server"
    done = subprocess.run(
        [str(VENV_PYTHON), "-c", code],
        env=env,
        cwd=str(STATE),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SetupError(
            f"What was installed cannot be imported:\n{tail(done.stdout.decode(errors='replace'))}"
        )


# ---- pip -----------------------------------------------------------------------------------------


class PipError(SetupError):
    """pip failed.

    not_found: whether no index that pip searched has that version for this Python.
    """

    def __init__(self, what: str, output: str) -> None:
        super().__init__(
            f"pip could not install {what}:\n{tail(output)}\n"
            "If no package index answered, check the network. Behind a proxy or with a mirror, tell"
            " pip (pip config, PIP_INDEX_URL, PIP_PROXY). Then run this again."
        )
        self.not_found = "No matching distribution found" in output


def pip_install(what: str, *args: str) -> None:
    """Run .venv's pip with the user's own pip configuration; raises PipError.

    On a terminal, pip shows its own progress. Elsewhere, as in the log of a CI, it is quiet.
    """
    say(f"installing {what}")
    env = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    quiet = () if sys.stdout.isatty() else ("-q",)
    command = [str(VENV_PYTHON), "-m", "pip", *PIP_INSTALL, *quiet, *args]
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, cwd=str(ROOT))
    if done.returncode:
        raise PipError(what, done.stderr)


def tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


# ---- the command ---------------------------------------------------------------------------------


def record(done: dict[str, str], wanted: dict[str, str], part: str) -> dict[str, str]:
    """Record in the stamp that `part` is done; returns the new stamp."""
    done = {**done, part: wanted[part]}
    STAMP.write_text(json.dumps(done, indent=1) + "\n")
    return done


def set_up(dev: bool) -> None:
    check_platform()
    choice, (python, version) = choose(CHOICE), choose_python()
    say(f"vLLM {choice.vllm} for {choice.device}")
    wanted, done = fingerprints(choice, python, version), read_stamp()
    if done.get("runtime") != wanted["runtime"]:
        check_interpreter(python, version)
        remove_stale_venv()
        make_venv(python, version, choice)
        install_runtime(choice)
        verify()
        done = record({}, wanted, "runtime")
        MARKER.unlink()
    keep(choice, CHOICE)  # also if the user asks for what .venv has
    stages = {"project": install_project, **({"dev": install_dev} if dev else {})}
    outdated = [part for part in stages if done.get(part) != wanted[part]]
    for part in outdated:
        stages[part]()
        done = record(done, wanted, part)
    chat_model.provide(VENV_PYTHON, say)  # no stamp: the model's own folder says how it was made
    if outdated:
        say("ready")


def main() -> int:
    checkout = os.open(str(ROOT), os.O_RDONLY)
    try:
        # Of two `make` at once, the second waits and then finds it done.
        fcntl.flock(checkout, fcntl.LOCK_EX)
        set_up(dev="--dev" in sys.argv[1:])
    except SetupError as error:
        print(f"\nset-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the next run starts over.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
