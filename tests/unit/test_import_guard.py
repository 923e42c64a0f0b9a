"""The import guard of conftest.py. It works whichever modules other tests have left in memory."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.unit.conftest import import_guard

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["vllm", "ray", "vllm.config", "ray.serve"])
def test_importing_an_engine_fails_with_a_sentence(name: str) -> None:
    with pytest.raises(ImportError, match=f"tests/unit may not import {name.partition('.')[0]}"):
        importlib.import_module(name)


def test_what_is_in_memory_already_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", pytest)
    with import_guard(), pytest.raises(ImportError, match="tests/unit may not import vllm"):
        from vllm import LLM  # noqa: F401
    assert sys.modules["vllm"] is pytest


def test_importorskip_does_not_hide_it() -> None:
    with pytest.raises(ImportError, match="tests/unit may not import ray"):
        pytest.importorskip("ray", exc_type=ModuleNotFoundError)


IMPORT_ALL = """
import importlib, sys
from tests.unit.conftest import import_guard
with import_guard():
    for name in sys.argv[1:]:
        importlib.import_module(f"tests.unit.{name}")
"""


def test_all_unit_tests_can_be_imported_without_vllm_and_ray() -> None:
    """In a process of its own, where nothing else has imported a module on a test's behalf."""
    root = HERE.parents[1]
    names = [path.stem for path in HERE.glob("test_*.py")]
    assert len(names) > 100
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    places = (".", *settings["tool"]["pytest"]["ini_options"]["pythonpath"])
    paths = [str(root / place) for place in places]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
