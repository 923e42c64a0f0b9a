"""Examples that ask a server, run with the commands that examples/README.md gives for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.examples.shell import COMMANDS, EXAMPLES, run

CLIENTS = ["openai_client.py", "langchain_chat.py", "llama_index_chat.py", "litellm_chat.py"]
SHOWS_GUIDANCE = [name for name in CLIENTS if "langchain" not in name]


@pytest.fixture(scope="module")
def shown_by(url: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a client shows. Each runs once."""

    @cache
    def shown_by(name: str) -> str:
        folder = tmp_path_factory.mktemp("client")
        return run(COMMANDS[name], folder, CFG_SERVE_URL=url).stdout

    return shown_by


@pytest.mark.parametrize(
    "name",
    [CLIENTS[0], *(pytest.param(name, marks=pytest.mark.survey) for name in CLIENTS[1:])],
)
def test_a_client_is_guided(name: str, shown_by: Callable[[str], str]) -> None:
    out = shown_by(name)
    (plain,) = re.findall(r"^plain: +(\S.*)$", out, re.MULTILINE)
    (guided,) = re.findall(r"^guided: +(\S.*)$", out, re.MULTILINE)
    (stream,) = re.findall(r"^stream: +(\S.*)$", out, re.MULTILINE)
    assert plain != guided == stream
    told = re.findall(r"^guidance.*'guided_tokens': (\d+)}$", out, re.MULTILINE)
    assert told == (["40", "40"] if name in SHOWS_GUIDANCE else [])


def test_the_openai_client_shows_each_stream_and_a_refusal(shown_by: Callable[[str], str]) -> None:
    out = shown_by("openai_client.py")
    number = r"\s+(-?\d+\.\d+)"
    row = rf"guided{number}  conditional{number}  negative{number}  KL{number}$"
    found = [[float(x) for x in line] for line in re.findall(row, out, re.MULTILINE)]
    assert len(found) == 5
    assert all(conditional != negative for _, conditional, negative, _ in found)
    assert max(kl for *_, kl in found) > 0.05
    assert "refused, param guidance_scael: " in out
    assert "Did you mean guidance_scale?" in out


# ---- passages and instructions -------------------------------------------------------------------


def test_passages_are_answered_from_more_often_with_guidance(url: str, tmp_path: Path) -> None:
    """8, 10 and 12 of 12 when it was measured."""
    out = run(COMMANDS["rag.py"], tmp_path, CFG_SERVE_URL=url).stdout
    found = re.findall(r"^scale (\S+): (\d+) of 12 right$", out, re.MULTILINE)
    right = {scale: int(count) for scale, count in found}
    assert list(right) == ["1", "1.5", "2"]
    assert right["1"] + 2 <= right["2"]
    assert right["2"] >= 10


@pytest.mark.survey  # four scales of all instructions; the one below reads its outputs
def test_the_notebook(url: str, tmp_path: Path) -> None:
    command = COMMANDS["instructions.ipynb"]
    assert "--inplace" in command
    output = tmp_path / "executed.ipynb"
    run(command.replace("--inplace", f"--output={output}"), tmp_path, CFG_SERVE_URL=url)
    shares = json.loads(re.sub(r"([\d.]+):", r'"\1":', results(output)["text/plain"]))
    assert list(shares) == ["1", "1.5", "2", "2.5"]
    assert shares["1"] + 0.1 < shares["2"]
    assert shares["1"] < shares["1.5"]


def results(notebook: Path) -> dict[str, Any]:
    """What the cells of a notebook show, by type. Fails if a cell did not run, or failed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown: dict[str, Any] = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["execution_count"]
        for output in cell["outputs"]:
            assert output["output_type"] in ("execute_result", "display_data"), output
            for kind, data in output["data"].items():
                shown.setdefault(kind, "".join(data))
    assert shown["image/png"]
    assert shown["text/markdown"].count("✓") > 5
    return shown


def test_the_notebook_is_kept_with_its_outputs() -> None:
    notebook = EXAMPLES / "instructions.ipynb"
    assert notebook.stat().st_size < 200_000
    assert results(notebook)
