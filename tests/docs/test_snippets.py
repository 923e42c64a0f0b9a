"""Every code block of the pages is run, or checked, or excepted with a reason.

Requests and clients: tests/chat/test_snippets.py. Programs: test_programs.py.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import LoggingConfig

from cfg_serve.check.file import problems
from deployments.config.args import AppArgs
from tests.docs.commands import check, commands_of
from tests.docs.running import ADDRESS, ON_THE_PAGE, each
from tests.docs.snippets import EXCEPTED, KINDS, SHELL, SNIPPETS, Snippet, counts


def test_none_is_unclassified(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nsnippets: {dict(counts().most_common())}")
    assert [str(x) for x in SNIPPETS if x.kind not in KINDS] == []


def test_exceptions_are_about_one_snippet_each() -> None:
    for page, part in EXCEPTED:
        assert sum(x.page == page and part in x.text for x in SNIPPETS) == 1, (page, part)


@each("command")
def test_commands_name_what_exists(snippet: Snippet) -> None:
    found = commands_of(snippet.text)
    assert found
    for words in found:
        check(words)


def test_each_page_says_once_where_the_server_is() -> None:
    """A reader with another port changes one line of a page, the first that needs it."""
    pages = {x.page for x in SNIPPETS if x.language in SHELL and f"${ADDRESS}" in x.text}
    assert len(pages) > 10
    for page in pages:
        texts = [x.text for x in SNIPPETS if x.page == page and x.language in SHELL]
        lines = [line for text in texts for line in text.splitlines()]
        first = next(line for line in lines if ADDRESS in line)
        assert first.startswith(f"export {ADDRESS}={ON_THE_PAGE} "), page
        assert [line for line in lines if ON_THE_PAGE in line] == [first], page


@each("json")
def test_json_parses(snippet: Snippet) -> None:
    json.loads(snippet.text)


@each("yaml")
def test_yaml_passes_the_checker(snippet: Snippet, tmp_path: Path) -> None:
    """A snippet is a whole file, Serve's logging, keys of `args`, or options of vLLM's engine."""
    given = yaml.safe_load(snippet.text)
    if set(given) == {"logging_config"}:
        LoggingConfig.model_validate(given["logging_config"])
        return
    given = given.get("args", given)
    if "applications" in given:
        file = tmp_path / "own.yaml"
        file.write_text(snippet.text)
        assert problems(file) == []
        args = given["applications"][0]["args"]
    elif set(given) <= set(AppArgs.model_fields):
        args = given if "models" in given else {"model": "models/stories", **given}
    else:
        args = {"model": "models/stories", "engine": {**given}}
    AppArgs.model_validate(args).resolved()


@pytest.mark.parametrize("snippet", [x for x in SNIPPETS if x.reason is not None], ids=str)
def test_what_is_excepted_is_valid(snippet: Snippet) -> None:
    if snippet.language == "python":
        ast.parse(snippet.text)
    else:
        assert snippet.language in SHELL, f"{snippet}: only programs may be excepted"
        for words in commands_of(snippet.text):
            check(words)


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "python scripts/nothing.py",
        "python scripts/docs.py --nothing",
        "python -m deployments.nothing",
        "serve deploy configs/nothing.yaml",
        "ray start --nothing",
        "curl-of-mine http://127.0.0.1",
    ],
)
def test_wrong_commands_are_found(line: str) -> None:
    (words,) = commands_of(line)
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        check(words)
