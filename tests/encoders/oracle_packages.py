"""Import the packages of `.venv/oracle`, with which tests compare this project."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = str(Path(sys.prefix) / "oracle")


@contextmanager
def oracle_packages() -> Iterator[None]:
    """Within the block, imports find these packages.

    Processes that a test starts inherit `sys.path`, and must not find them: see
    requirements/oracle.in.
    """
    sys.path.append(FOLDER)
    try:
        yield
    finally:
        sys.path.remove(FOLDER)
