"""Unit tests cannot import vllm or ray. Such tests would depend on an engine and take minutes.

While a file of this folder is collected, and while its tests run, the two packages cannot be
imported, even if tests of other folders have imported them before. `test_import_guard.py` tests the
guard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
FORBIDDEN = ("vllm", "ray")


class ImportGuardError(ImportError):
    """Not a ModuleNotFoundError, so that pytest.importorskip does not turn it into a skip."""


class _Refuses(Loader):
    """The first finder of sys.meta_path: Python asks it for each module that is not in memory.

    It finds the packages, since code of ours reads their source without importing them, but loads
    none of their modules.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if is_forbidden(name) else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        raise ImportGuardError(
            f"tests/unit may not import {module.__name__}: test the pure module below it, or move "
            "the test to tests/simulation, tests/engine or tests/serve."
        )


def is_forbidden(name: str) -> bool:
    return name.partition(".")[0] in FORBIDDEN


@contextmanager
def import_guard() -> Iterator[None]:
    """Refuse `import vllm` and `import ray` inside the with block."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if is_forbidden(name)}
    finder = _Refuses()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(hidden)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """pytest calls this hook for all folders. The guard is for files of this folder only."""
    if HERE not in collector.path.parents:
        return (yield)
    with import_guard():
        return (yield)


@pytest.fixture(scope="package", autouse=True)
def _import_guard() -> Iterator[None]:
    with import_guard():
        yield
