"""Run vLLM's own tests of its scheduler with our scheduler, and compare with vLLM's. CPU only.

    python scripts/versions/upstream_tests.py 0.33.0
    python scripts/versions/upstream_tests.py 0.33.0 --tests tests/v1/core/test_scheduler.py

The tests come from vLLM's sdist, and are unpacked beside the installed vLLM (beside.py). They run
with vLLM's scheduler, then with ours. A test may end differently only if KNOWN in
upstream_report.py says why. If anything else is different, the exit status is 1. In one more run,
each step is planned as if there were guided requests beside the plain ones. It shows whether our
scheduler treats plain requests as vLLM does then, and does not change the exit status.

vLLM's conftest.py is not loaded, because it needs more packages. The models that the tests name are
made here (upstream_models.py). Tests that need anything else from the hub, or a GPU, fail in both
runs. The report names them. For both tested versions it takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import beside
from packaging.version import Version
from upstream_plugin import OURS, PLANNED, STOCK, Results
from upstream_report import Comparison, report, report_more, with_our_scheduler

TESTS = ("tests/v1/core",)
LIMIT_S = 1200
TEST_LIMIT_S = 300
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler of an engine is made in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # else our plugin changes stock vLLM, too
}
BACKEND = '''
"""A build backend that builds nothing: the metadata of an sdist is in its PKG-INFO."""
from email.parser import BytesParser
from pathlib import Path

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    metadata = Path("PKG-INFO").read_bytes()
    fields = BytesParser().parsebytes(metadata)
    folder = Path(directory) / f"{fields['Name']}-{fields['Version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(metadata)
    return folder.name
'''


# ---- the tests of a version ----------------------------------------------------------------------


def unpacked(version: str) -> Path:
    """The folder with the tests of vLLM `version`, which are downloaded if they are not there yet.

    Raises BesideError.
    """
    folder = beside.FOLDER / f"tests-{beside.parsed(version)}"
    if (folder / beside.DONE).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="cfg-serve-sdist-") as temporary:
        unpack(download(version, Path(temporary)), folder)
    (folder / beside.DONE).touch()
    return folder


def download(version: str, into: Path) -> Path:
    """The sdist of vLLM `version`, downloaded by pip.

    pip asks the sdist's build backend for metadata. vLLM's backend needs torch and compilers, so
    BACKEND is put in its place, and no code of the sdist runs.
    """
    backend = into / "setuptools"
    backend.mkdir()
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary=:all:", "--dest", str(into), f"vllm=={version}"]
    env = os.environ | {"PYTHONPATH": str(into)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise beside.BesideError(f"pip could not download the sdist:\n{done.stderr[-2000:]}")
    return next(into.glob("*.tar.gz"))


def unpack(sdist: Path, folder: Path) -> None:
    """Unpack tests/ and pytest's settings."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if name.startswith("tests/") or name == "pyproject.toml":
                archive.extract(member.replace(name=name), folder, filter="data")


def environment(version: str, tests: Path) -> dict[str, str]:
    """The environment of vLLM `version`. Its `tests` come before ours."""
    vllm = beside.ROOT if Version(version) == pinned() else beside.install(version)
    env = beside.environment(vllm) | SETTINGS
    paths = [str(tests), env["PYTHONPATH"], str(Path(__file__).resolve().parent)]
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def pinned() -> Version:
    """The version of the vLLM in `.venv`, whichever build it is."""
    for build in beside.BUILDS:
        try:
            return Version(Version(importlib.metadata.version(build)).public)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise beside.BesideError("There is no vLLM in .venv: run `make setup`.")


# ---- a run ---------------------------------------------------------------------------------------


class Runner:
    """Runs tests of vLLM in the folder `tests`. `at_once`: number of processes."""

    def __init__(self, tests: Path, env: Mapping[str, str], at_once: int) -> None:
        self._tests, self._env, self._at_once = tests, env, at_once

    def run(self, scheduler: str, tests: Iterable[str], at_once: int | None = None) -> Results:
        """Raises BesideError if pytest cannot run."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="cfg-serve-upstream-") as temporary:
            path = Path(temporary) / "results.json"
            processes = self._at_once if at_once is None else at_once
            command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes)]
            command += ["-p", "upstream_plugin", "-p", "no:cacheprovider", "--noconftest"]
            command += ["--continue-on-collection-errors", f"--timeout={TEST_LIMIT_S}"]
            command += ["--dist=worksteal"]
            command += [f"--scheduler={scheduler}", f"--results={path}", *tests]
            done = subprocess.run(
                command,
                cwd=self._tests,
                env=self._env,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            if not path.exists():
                raise beside.BesideError(f"pytest: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            results = Results.read(path)
        seconds = time.monotonic() - start
        print(f"upstream_tests: {scheduler}: {seconds:.0f} s", file=sys.stderr, flush=True)
        return results


# ---- the command ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="a published version of vLLM")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of its tests")
    parser.add_argument("--at-once", type=int, default=2, help="number of processes")
    given = parser.parse_args()
    from upstream_models import make  # needs torch

    try:
        tests = unpacked(given.version)
        make(tests)
        runner = Runner(tests, environment(given.version, tests), given.at_once)
        return compare(runner, given.tests)
    except (beside.BesideError, subprocess.TimeoutExpired) as error:
        print(f"upstream_tests: {error}", file=sys.stderr)
        return 1


def compare(runner: Runner, tests: Iterable[str]) -> int:
    compared = Comparison(runner.run(STOCK, tests), runner.run(OURS, tests))
    once = compared.different() | compared.by_chance()
    if once:  # alone: on a busy machine, tests with engines and time limits may fail by chance
        compared.replace(*(runner.run(scheduler, once, at_once=0) for scheduler in (STOCK, OURS)))
    different = compared.different()
    still = different.keys() | compared.by_chance().keys() | compared.known().keys()
    unsteady = {test: why for test, why in once.items() if test not in still}
    print(report(compared, unsteady), flush=True)
    made = with_our_scheduler(compared.both("passed"))
    if made:
        planned = runner.run(PLANNED, made)
        print(report_more("Each step planned", planned), flush=True)
    return 1 if different or not compared.both("passed") else 0


if __name__ == "__main__":
    sys.exit(main())
