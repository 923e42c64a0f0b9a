"""Brings vLLM to a GPU machine without network, in transfers of limited size.

The machine has Python 3.12, torch and CUDA's libraries, but neither vLLM nor Ray. `pack` makes a
folder of installed packages here (wheels.txt names them, and requirements/ pins them), leaves out
what no slice loads, and cuts it into parts. `install` unpacks them there. A vLLM that is newer than
the pinned one goes beside it, into a folder of its own.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = HERE / "wheels.txt"
VERSIONS = ("0.32", "0.33")
USUAL = "0.32.0"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
PYTHON = ["--python-version", "3.12", "--implementation", "cp"]
LEFT_OUT = (
    "*.a",
    "*/tests/*",
    "torch/include/*",
    "torch/lib/libtorch_cuda_linalg.so",
    "torch/test/*",
    "vllm/_flashmla*",
    "vllm/_qutlass*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
)
"""Files that no slice loads on a Hopper GPU."""
ARCHIVE = "site-{version}.tar.xz"
SPARE_MIB = 2
STUB = "nccl_stub.so"
"""A library that defines what the machine's NCCL lacks. One GPU never calls it."""
NCCL = "nvidia/nccl/lib/libnccl.so*"
"""In a folder of Python packages."""
COPIED = Path(tempfile.gettempdir()) / "gpu"
"""Where the parts are copied on that machine."""


def sites() -> dict[str, Path]:
    """The folders with a vLLM that are on this machine, by version."""
    found = {f"{v}.0": site_of(v) for v in VERSIONS}
    beside = Path(sys.prefix) / "beside"
    found = {v: site if site.is_dir() else beside / v for v, site in found.items()}
    return {version: site for version, site in found.items() if site.is_dir()}


def site_of(version: str) -> Path:
    return Path(tempfile.gettempdir()) / f"site-{version}"


def pack(version: str, into: Path, room_mib: int) -> int:
    """Make the parts in `into`, and print the calls that bring them over. Returns 0.

    room_mib: of one transfer, the working tree included.
    """
    wheels = into / f"wheels-{version}"
    site = into / f"site-{version}"
    for folder in (wheels, site):
        shutil.rmtree(folder, ignore_errors=True)
    names = requirements(WHEELS.read_text("utf-8"), pins(version))
    target = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--only-binary=:all:", *PYTHON, *platforms, "--target", str(site)]
    subprocess.run([*target, *options, *names], check=True)
    archive = into / ARCHIVE.format(version=version)
    archived(site, archive)
    room = (room_mib - SPARE_MIB << 20) - tree_bytes()
    parts = cut(archive, room)
    for line in calls([part.relative_to(into.parent) for part in parts], version):
        print(line)
    shutil.rmtree(site)
    archive.unlink()
    return 0


def pins(version: str) -> dict[str, str]:
    """The versions of requirements/cuda-VERSION.txt, by normalised name."""
    text = (ROOT / "requirements" / f"cuda-{version}.txt").read_text("utf-8")
    found = re.finditer(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s\\;]+)", text, re.MULTILINE)
    return {normalised(match[1]): match[2] for match in found}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(names: str, pinned: dict[str, str]) -> list[str]:
    """`NAME==VERSION` for each line of `names`; a line with a version of its own keeps it.

    Raises KeyError for a name without a version.
    """
    lines = (line.partition("#")[0].strip() for line in names.splitlines())
    return [
        line if "==" in line else f"{line}=={pinned[normalised(line)]}" for line in lines if line
    ]


def archived(site: Path, archive: Path) -> None:
    """Write what is in `site`, less LEFT_OUT, to a compressed archive."""
    with (
        archive.open("wb") as file,
        subprocess.Popen(["xz", "-T0", "-3", "-c"], stdin=subprocess.PIPE, stdout=file) as xz,
    ):
        with tarfile.open(fileobj=xz.stdin, mode="w|") as out:
            for path in sorted(site.rglob("*")):
                if path.is_file() and not is_left_out(path.relative_to(site).as_posix()):
                    out.add(path, arcname=path.relative_to(site).as_posix())
        assert xz.stdin is not None
        xz.stdin.close()
    if xz.returncode:
        raise subprocess.CalledProcessError(xz.returncode, "xz")


def is_left_out(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)


def tree_bytes() -> int:
    """The size of the working tree, which travels with each transfer."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    paths = (ROOT / name for name in listing.decode().split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


def cut(archive: Path, room: int) -> list[Path]:
    """Cut a file into parts of at most `room` bytes, beside it. Raises ValueError if room < 1."""
    if room < 1:
        raise ValueError("The working tree alone fills a transfer: leave files out of it.")
    parts: list[Path] = []
    with archive.open("rb") as file:
        while piece := file.read(room):
            part = archive.with_name(f"{archive.name}.{len(parts):03d}")
            part.write_bytes(piece)
            parts.append(part)
    return parts


def calls(parts: Sequence[Path], version: str) -> Iterator[str]:
    """The calls of a device tool, in order, as lines to read: what to carry, and the command."""
    for part in parts:
        yield f"carry {part}: mkdir -p {COPIED} && cp {part} {COPIED}/"
    yield f"then: python3 -m tools.gpu.run install {COPIED}"
    if f"{version}.0" == USUAL:
        figures = COPIED.parent / "figures"
        yield f"then: python3 -m tools.gpu.run run --out {figures} --bundle $OUT"


def install(parts: Path) -> int:
    """Unpack all parts that are in a folder, and see that torch can be imported. Returns 0 if so.

    The folder of a version is made anew.
    """
    for version in VERSIONS:
        name = ARCHIVE.format(version=version)
        pieces = sorted(parts.glob(f"{name}.[0-9][0-9][0-9]"))
        if not pieces:
            continue
        site = site_of(version)
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir()
        unpack(pieces, site)
        mend_nccl(site)
        done = subprocess.run([sys.executable, "-c", "import torch, vllm"], env=environment(site))
        print(f"{site}: {'ready' if done.returncode == 0 else 'cannot be imported, see above'}")
        if done.returncode:
            return 1
    return 0


def unpack(pieces: Sequence[Path], site: Path) -> None:
    """Unpack an archive that was cut into pieces. Raises CalledProcessError."""
    command = ["tar", "-I", "xz -T0", "-x", "-C", str(site)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        for piece in pieces:
            tar.stdin.write(piece.read_bytes())
        tar.stdin.close()
    if tar.returncode:
        raise subprocess.CalledProcessError(tar.returncode, command)


def environment(site: Path) -> dict[str, str]:
    """Variables of a process that uses a folder of packages, before the machine's own."""
    given = os.environ.get("PYTHONPATH", "")
    out = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [given])])}
    stub = site / STUB
    return out | ({"LD_PRELOAD": str(stub)} if stub.exists() else {})


# --- an NCCL that is older than torch -------------------------------------------------------------


def mend_nccl(site: Path) -> None:
    """Define the functions that torch asks of NCCL, and that the machine's NCCL lacks.

    A single GPU never calls them, but torch cannot be imported without them. Needs `nm` and `cc`;
    without these, or if nothing is lacking, it does nothing.
    """
    torch = site / "torch" / "lib" / "libtorch_cuda.so"
    nccl = next((path for place in sys.path for path in Path(place).glob(NCCL)), None)
    if not torch.exists() or nccl is None or not (shutil.which("nm") and shutil.which("cc")):
        return
    lacking = symbols(torch, "--undefined-only") - symbols(nccl, "--defined-only")
    if lacking:
        source = site / "nccl_stub.c"
        source.write_text(stub_source(lacking), "utf-8")
        command = ["cc", "-shared", "-fPIC", "-o", str(site / STUB), str(source)]
        subprocess.run(command, check=True)
        print(f"defined for torch: {', '.join(sorted(lacking))}")


def symbols(library: Path, kind: str) -> set[str]:
    """The names of NCCL's functions that a library defines, or uses."""
    command = ["nm", "-D", kind, str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = (line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.strip())
    return {name for name in names if re.fullmatch(r"p?nccl[A-Z]\w*", name)}


def stub_source(names: set[str]) -> str:
    """A C source whose functions fail: 3 is ncclInternalError."""
    return "".join(f"int {name}(void) {{ return 3; }}\n" for name in sorted(names))
