"""Unit tests cannot import vllm or ray. Such tests would depend on an engine and take minutes.

While a test of this folder is collected or run, every import statement calls `guarded`. This
includes imports in modules that tests of other folders have imported before. `test_import_guard.py`
tests the guard.
"""

from __future__ import annotations

import builtins
import importlib
import logging.config  # noqa: F401 - it keeps the `__import__` that it is imported with
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FORBIDDEN = ("vllm", "ray")


class ImportGuardError(ImportError):
    """Not a ModuleNotFoundError, so that pytest.importorskip does not turn it into a skip."""


def refuse(name: str) -> None:
    """Raise if `name` is a module that unit tests may not import."""
    if name.partition(".")[0] in FORBIDDEN:
        raise ImportGuardError(
            f"tests/unit may not import {name}: test the pure module below it, or move the test to "
            "tests/simulation, tests/engine or tests/serve."
        )


@contextmanager
def import_guard() -> Iterator[None]:
    """Refuse `import vllm` and `import ray` inside the with block."""
    original = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if not _is_relative(*args, **kwargs):
            refuse(name)
        return original(name, *args, **kwargs)

    import_module = importlib.import_module

    def guarded_import_module(name: str, package: str | None = None) -> Any:
        """A module that is already in memory is found without a call of `__import__`."""
        if not name.startswith("."):
            refuse(name)
        return import_module(name, package)

    builtins.__import__, importlib.import_module = guarded, guarded_import_module
    try:
        yield
    finally:
        builtins.__import__, importlib.import_module = original, import_module


def _is_relative(
    _globals: Any = None, _locals: Any = None, _fromlist: Any = (), level: int = 0, **_: Any
) -> bool:
    return level > 0


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """pytest calls this hook for all folders. The guard is for files of this folder only."""
    if HERE not in collector.path.parents:
        return (yield)
    with import_guard():
        return (yield)


@pytest.fixture(autouse=True)
def _import_guard() -> Iterator[None]:
    with import_guard():
        yield
