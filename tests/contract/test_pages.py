"""Every page, and every file of deploy/, that comes from the code is current."""

from __future__ import annotations

from pathlib import Path

import pytest
import write


@pytest.mark.parametrize("path", write.WRITTEN, ids=lambda path: path.name)
def test_what_is_written_from_the_code_is_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert write.WRITTEN[path](text) == text, "run make pages"


def test_an_old_table_would_be_noticed() -> None:
    path = write.config_page.PAGE
    old = path.read_text(encoding="utf-8").replace("| `model` |", "| `models_old` |", 1)
    assert write.WRITTEN[path](old) != old
