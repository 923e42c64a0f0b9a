"""One server for the tests of this folder: see limited_server.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.limited.server import limited_server as start
from tools.serving.process import ServeProcess


@pytest.fixture(scope="package")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with start(tmp_path_factory.mktemp("lora")) as process:
        yield process
