"""One server for the snippets of all pages: the shipped configs/cfg.yaml, which they are about."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "serve"))

from serve_process import ServeProcess, shipped_config


@pytest.fixture(scope="session")
def chat_url(chat_model: Path) -> Iterator[str]:
    """The address of the server."""
    with ServeProcess(shipped_config("cfg")) as process:
        yield process.url
