"""The site builds without a warning, needs no other host, and each picture has its script."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DRAWN = re.compile(r"^\| \[([\w/]+\.svg)\]\(\1\) \|.*\| `python ([^`]+)`", re.MULTILINE)
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, of which a test may break a page."""
    copy = tmp_path_factory.mktemp("site") / "copy"
    left_out = shutil.ignore_patterns(".*", "build", "__pycache__", "SmolLM2*", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


@pytest.fixture(scope="module")
def site(copy: Path) -> Path:
    """The site, built with warnings as errors."""
    done = built(copy)
    assert done.returncode == 0, done.stderr
    return copy / "build/docs"


def built(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "scripts/docs.py")]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_page_is_in_the_sidebar_of_the_first(site: Path) -> None:
    first = (site / "docs/index.html").read_text(encoding="utf-8")
    sidebar = first[first.index("sidebar-tree") : first.index("</aside>")]
    for page in DOCS.rglob("*.md"):
        if page.name != "index.md":
            link = page.relative_to(DOCS).with_suffix(".html")
            assert f'href="{link}"' in sidebar, link
    assert 'href="../README.html"' in sidebar


def test_the_first_page_links_to_every_page() -> None:
    """For readers of the repository, who have no sidebar. LOG.md links to the pages of the log."""
    first = (DOCS / "index.md").read_text(encoding="utf-8")
    log = (ROOT / "LOG.md").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        links = log if page.parent.name == "log" else first
        link = page.relative_to(ROOT if page.parent.name == "log" else DOCS)
        assert page.name == "index.md" or f"({link})" in links, page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        assert not LOADED.findall(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), style


def test_a_broken_anchor_stops_the_build(copy: Path, site: Path) -> None:
    """The build goes on from that of `site`."""
    page = copy / "docs/tune.md"
    page.write_text(page.read_text() + "\nSee [nothing](speed.md#nothing).\n")
    done = built(copy)
    assert done.returncode != 0
    assert "nothing" in done.stderr
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 1, done.stderr


def drawings() -> dict[str, str]:
    """The command that draws each picture, by its path in docs."""
    return dict(DRAWN.findall((DOCS / "pictures.md").read_text(encoding="utf-8")))


def test_each_picture_has_a_script() -> None:
    """Screens and pixels are no SVGs. Their scripts are named; some need a running server."""
    pictures = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.svg")}
    assert set(drawings()) == pictures
    assert len(pictures) >= 8
    page = (DOCS / "pictures.md").read_text(encoding="utf-8")
    for path in [*DOCS.rglob("*.png"), *DOCS.rglob("*.gif"), *DOCS.rglob("*.jpg")]:
        name = path.relative_to(DOCS)
        (row,) = [line for line in page.splitlines() if f"[{name}]({name})" in line]
        (script,) = re.findall(r"`python (?:-m )?(\S+?)`", row)
        assert (ROOT / script).is_file() or importlib.util.find_spec(script), script


@pytest.mark.parametrize("command", sorted(set(drawings().values())))
def test_the_scripts_draw_what_is_committed(command: str, tmp_path: Path) -> None:
    words = [str(tmp_path) if x == "FOLDER" else x.replace("OUT.svg", "") for x in command.split()]
    names = [name for name, made_by in drawings().items() if made_by == command]
    if not words[-1]:
        (name,) = names
        words[-1] = str(tmp_path / Path(name).name)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    for name in names:
        assert (tmp_path / Path(name).name).read_bytes() == (DOCS / name).read_bytes(), name


def test_a_picture_has_a_dark_twin_on_dark_pages(site: Path) -> None:
    page = (site / "docs/playground.html").read_text(encoding="utf-8")
    shown = {
        name: classes
        for tag in re.findall(r"<img [^>]*playground[^>]*>", page)
        for name in re.findall(r'src="[^"]*/(playground[\w-]*\.png)"', tag)
        for classes in re.findall(r'class="([^"]*)"', tag)
    }
    assert shown == {"playground.png": "only-light", "playground-dark.png": "only-dark"}
    style = next(site.rglob("site.css")).read_text(encoding="utf-8")
    assert 'data-theme="dark"' in style
    assert "prefers-color-scheme: dark" in style
