"""Markdown that the pages' scripts write: tables, and blocks between two comments of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table without a line break at its end."""
    names = tuple(head)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def with_block(text: str, mark: str, content: str) -> str:
    """`text` of a page with other content between `<!-- mark -->` and `<!-- end -->`."""
    block = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert block.search(text), f"the page has no block {mark}"
    return block.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)
