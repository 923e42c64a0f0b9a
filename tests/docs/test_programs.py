"""Programs of the pages run, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.running import each, run_program
from tests.docs.snippets import Snippet


@pytest.mark.slow
@each("program")
def test_programs_run(snippet: Snippet, tmp_path: Path) -> None:
    printed = run_program(snippet, tmp_path)
    assert printed.strip() or "print(" not in snippet.text
