"""What contract tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.warm_process import WarmProcess


@pytest.fixture(scope="session")
def warm_process() -> Iterator[WarmProcess]:
    with WarmProcess() as process:
        yield process
