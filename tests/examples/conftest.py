"""One server for all examples that ask one: the shipped configs/cfg.yaml, on a free port."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "serve"))

from serve_process import ServeProcess, shipped_config


@pytest.fixture(scope="session")
def url(chat_model: Path) -> Iterator[str]:
    """The address of a server. If CFG_SERVE_URL is set, it is that one."""
    if given := os.environ.get("CFG_SERVE_URL"):
        yield given
        return
    with ServeProcess(shipped_config("cfg")) as process:
        yield process.url
