"""The page docs/patches.md, made from the tables of patches and of uses of private names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from page_tables import table

from cfg_core.patching import Row
from cfg_core.prefill_only import private_uses
from cfg_core.vllm_plugin import vllm_patches
from deployments import serve_patches

PAGE = Path(__file__).resolve().parents[2] / "docs" / "patches.md"

HEAD = """# What is changed inside other packages
cfg-serve runs on stock vLLM. vLLM lets its users name a scheduler and a worker class, and subclass
its GPU worker. Where it has no hook, we change it at run time, and only in processes that run a
guided engine. An unguided vLLM in the same environment stays as it is. Each change is a row here.

The test of a row fails when the change no longer works. The last column says what holds in the
installed package as long as the change is needed: a function makes or calls something by its name,
so another cannot be chosen, or a test passes. tests/contract/test_still_needed.py fails when that
is no longer so, and then the row may go. For some rows there is no way to notice. This page is
written by `make pages`.
"""
PATCHES = "They replace an attribute of a class or module, for all of the process."
USES = "Our code changes one object that it holds. Other objects of the class stay as they are."


def page() -> str:
    """The text of docs/patches.md."""
    return (
        f"{HEAD}\n## Patches\n{PATCHES}\n"
        f"\n### The vLLM plugin\n{as_markdown(vllm_patches.PATCHES)}"
        f"\n### The Serve application\n{as_markdown(serve_patches.PATCHES)}"
        f"\n## Uses of private names\n{USES}\n"
        f"\n### The vLLM plugin\n{as_markdown(vllm_patches.USES)}"
        f"\n### The Serve application\n{as_markdown(serve_patches.USES)}"
        f"\n### The prefill-only engine\n{as_markdown(private_uses.USES)}"
    )


def as_markdown(changes: Iterable[Row]) -> str:
    """A table, in which the target of a row has a dot for the colon."""
    cells = []
    for row in changes:
        calls = " calls " in row.needed_while
        needed = row.needed_while.replace(":", ".") if calls else row.needed_while
        target = row.target.replace(":", ".")
        cells.append((target, row.process, row.reason, row.upstream, row.test, needed))
    return table(("changed", "in", "why", "upstream", "test", "needed while"), cells) + "\n"
