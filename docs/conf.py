"""The pages as a site: what Sphinx reads (scripts/docs.py runs it).

The source folder is the repository itself, so that each page is found at its own path and the links
between pages are those that a reader of the repository follows. A link to a file that is no page
becomes a copy of that file, so the site needs no other host. A link to a folder becomes plain text.

The sidebar stands here and not in the pages, because a toctree in Markdown would show as code to
readers of the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx import addnodes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cfg_core import __version__  # noqa: E402

SIDEBAR: dict[str, tuple[str, ...]] = {
    "Start": (
        "docs/get-started",
        "docs/playground",
        "docs/own-model",
        "docs/concepts",
        "docs/ray-llm",
        "docs/words",
        "docs/moving",
    ),
    "Recipes": (
        "docs/recipes/negative-prompts",
        "docs/recipes/system-prompt",
        "docs/recipes/json",
        "docs/recipes/several-negatives",
        "docs/recipes/passages",
        "docs/recipes/thinking",
        "docs/recipes/images",
        "docs/recipes/token-models",
        "docs/digits",
        "examples/README",
        "docs/evaluation",
    ),
    "Reference": (
        "docs/guidance",
        "docs/request-fields",
        "docs/routes",
        "docs/sampling",
        "docs/embeddings",
        "docs/encoders",
        "docs/command",
        "docs/configuration",
        "docs/engine-options",
        "docs/limits",
        "docs/models",
        "docs/patches",
    ),
    "Tune": ("docs/tune", "docs/instructions", "docs/speed", "docs/speculation"),
    "Deploy and operate": (
        "deploy/README",
        "docs/operations",
        "docs/watch",
        "docs/operations-measured",
        "docs/ray-llm",
        "docs/versions",
        "docs/gpu",
    ),
    "Project": (
        "README",
        "ARCHITECTURE",
        "CONTRIBUTING",
        "SECURITY",
        "models/README",
        "docs/pictures",
        "CHANGELOG",
    ),
    "Engineering log": (
        "LOG",
        "docs/log/engine",
        "docs/log/speed",
        "docs/log/speculation",
        "docs/log/models",
        "docs/log/versions",
        "docs/log/grammars",
        "docs/log/attacks",
        "docs/log/http",
        "docs/log/serve",
        "docs/log/routing",
        "docs/log/encoders",
        "docs/log/texts",
        "docs/log/pages",
        "docs/log/setup-and-tests",
    ),
}
"""The captions, with the pages under each. A page that is missing here fails the build."""

project = "cfg-serve"
version = release = __version__
root_doc = "docs/index"
extensions = ["myst_parser"]
WITH_PAGES = ("docs", "deploy", "examples", "models")
include_patterns = [
    "docs/**.md",
    "deploy/README.md",
    "examples/README.md",
    "models/README.md",
    "*.md",
]
# Folders without pages. Sphinx would walk them.
exclude_patterns = [
    *(f"{x.name}/**" for x in ROOT.iterdir() if x.is_dir() and x.name not in WITH_PAGES),
    *("models/SmolLM2*/**", "models/.*/**"),
]
myst_heading_anchors = 4
nitpicky = True
smartquotes = False  # pages quote what a user types

html_theme = "furo"
html_title = f"cfg-serve {__version__}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
templates_path: list[str] = []


def toctrees() -> str:
    """The sidebar as hidden toctrees, in Markdown."""
    parts = []
    for caption, pages in SIDEBAR.items():
        lines = "\n".join(f"/{page}" for page in pages)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```")
    return "\n\n".join(parts)


def add_sidebar(_app: Any, page: str, source: list[str]) -> None:
    """Add the sidebar to the first page, as if it stood at the page's end."""
    if page == root_doc:
        source[0] += f"\n\n{toctrees()}\n"


def folders_as_text(app: Any, page: Any) -> None:
    """Replace each link to a folder of the repository by its text."""
    for link in list(page.findall(addnodes.pending_xref)):
        target = link.get("reftarget") or "#"
        _, path = app.env.relfn2path(target, app.env.current_document.docname)
        if not target.startswith("#") and Path(path).is_dir():
            link.replace_self(link.children)


def dark_twins(app: Any, page: Any) -> None:
    """Beside each picture with a twin NAME-dark, add the twin; furo shows one of them."""
    for picture in list(page.findall(lambda node: node.tagname == "image")):
        light = Path(picture["uri"])
        dark = str(light.with_stem(f"{light.stem}-dark"))
        _, path = app.env.relfn2path(dark, app.env.current_document.docname)
        if Path(path).is_file():
            twin = picture.deepcopy()
            twin["uri"] = dark
            twin["classes"].append("only-dark")
            picture["classes"].append("only-light")
            picture.parent.insert(picture.parent.index(picture) + 1, twin)


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("doctree-read", dark_twins, priority=400)  # before Sphinx collects pictures
    app.connect("source-read", add_sidebar)
    app.connect("doctree-read", folders_as_text)
