"""Requests and clients of all pages, on the server that the pages are about."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.running import answers_of_shell, each, run_with_client
from tests.docs.snippets import Snippet


@each("curl")
def test_requests_of_the_shell_are_answered(snippet: Snippet, url: str, tmp_path: Path) -> None:
    answers = answers_of_shell(snippet, url, tmp_path)
    assert len(answers) >= len(re.findall(r"^\s*curl ", snippet.text, re.MULTILINE))
    for answer in answers:
        assert not (isinstance(answer, dict) and "error" in answer), answer
        if isinstance(answer, dict) and re.search(r'"guidance_(scale|streams)"', snippet.text):
            assert answer.get("guidance", {}).get("guided_tokens", 1) > 0
            assert "note" not in answer.get("guidance", {}), answer["guidance"]


@each("client")
def test_python_with_a_client_runs(snippet: Snippet, url: str) -> None:
    statuses = run_with_client(snippet, url)
    assert set(statuses) == {200} or "OpenAI(" in snippet.text
