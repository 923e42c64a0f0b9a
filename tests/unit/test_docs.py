"""The pages: links lead to files, lines are short, and the tables match the code."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "deploy/README.md",
    ROOT / "examples/README.md",
    ROOT / "models/README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_at_most_100_columns(page):
    is_code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_code ^= line.startswith("```")
        assert is_code or line.startswith("|") or len(line) <= 100, line


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_operations_page_shows_every_metric():
    script = importlib.import_module("metrics_page")
    text = script.PAGE.read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `(cfg_serve_\w+)` ", text, re.MULTILINE))
    assert shown == {family.full_name for family in script.ALL}
    named = set(re.findall(r"\bcfg_serve_\w+", text))
    known = {f"{name}{end}" for name in shown for end in ("", "_bucket", "_sum", "_count")}
    assert named <= known, "the page names metrics that do not exist"


def test_the_files_and_folders_that_architecture_names_exist():
    """By the end of their paths, so that a name may leave out the folders above."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tops = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    there = "".join(
        f"/{path.relative_to(ROOT)}/\n" for top in tops for path in (top, *top.rglob("*"))
    )
    named = set(re.findall(r"(?<![\w/*.-])[\w-]+(?:/[\w-]+)*(?:\.py|/)(?!\w)", text))
    assert len(named) >= 60
    assert [name for name in named if f"/{name.rstrip('/')}/\n" not in there] == []
