"""The packages of `.venv/oracle`, with which tests and benchmarks compare this project.

requirements/oracle.in says why they are not in site-packages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

FOLDER = str(Path(sys.prefix) / "oracle")


@contextmanager
def oracle_packages() -> Iterator[None]:
    """Within the block, imports find these packages.

    Processes that are started later inherit `sys.path`, and must not find them.
    """
    sys.path.append(FOLDER)
    try:
        yield
    finally:
        sys.path.remove(FOLDER)


def oracle_version(package: str) -> str:
    """The version of one of them. Raises StopIteration if it is not there."""
    return next(iter(distributions(name=package, path=[FOLDER]))).version
