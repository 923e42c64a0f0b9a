"""The import guard of conftest.py. It works whichever modules other tests have left in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

IMPORT_EVERYTHING = """
import importlib, sys
sys.modules.update(vllm=None, ray=None)  # makes every import of them fail
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("name", ["vllm", "ray", "vllm.config", "ray.serve"])
def test_importing_an_engine_fails_with_a_sentence(name: str) -> None:
    with pytest.raises(ImportError, match=f"tests/unit may not import {name}"):
        exec(f"import {name}")


def test_from_imports_fail_too() -> None:
    with pytest.raises(ImportError, match="tests/unit may not import vllm"):
        from vllm import LLM  # noqa: F401


def test_what_is_in_memory_already_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", pytest)
    with pytest.raises(ImportError, match="tests/unit may not import vllm"):
        import vllm  # noqa: F401


def test_importorskip_does_not_hide_it() -> None:
    with pytest.raises(ImportError, match="tests/unit may not import ray"):
        pytest.importorskip("ray", exc_type=ModuleNotFoundError)


def test_all_unit_tests_can_be_imported_without_vllm_and_ray() -> None:
    names = sorted(path.stem for path in HERE.glob("test_*.py"))
    command = [sys.executable, "-c", IMPORT_EVERYTHING, str(HERE), *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stderr
