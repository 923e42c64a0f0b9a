"""Markdown that the pages' scripts write: tables, and blocks between two comments of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table without a line break at its end."""
    names = tuple(head)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """`text` of a page with other contents between each `<!-- mark -->` and its `<!-- end -->`.

    blocks: the contents by their marks. AssertionError if the page lacks one of them.
    """
    for mark, content in blocks.items():
        before, start, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"the page has no block {mark}"
        text = f"{before}{start}{content}\n{end}{after}"
    return text
