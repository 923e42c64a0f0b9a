"""One server for the tests of this folder: the shipped configs/cfg.yaml with its chat model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_process import ServeProcess, shipped_config


@pytest.fixture(scope="package")
def chat_server(chat_model: Path) -> Iterator[ServeProcess]:
    with ServeProcess(shipped_config("cfg"), stock=True) as process:
        yield process
