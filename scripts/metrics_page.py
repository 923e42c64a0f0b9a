"""Write the table of metrics in docs/operations.md from the code that makes them.

    python scripts/metrics_page.py

The table stands between two comments.
"""

from __future__ import annotations

import re
from pathlib import Path

from deployments.ingress.metric_families import ALL

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
MARK = re.compile(r"(<!-- metrics -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """The metrics, as Markdown."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{one.full_name}` | {one.kind} | {', '.join(one.labels) or '-'} | {one.help} |"
        for one in ALL
    ]
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with its table up to date, made from its present `text`."""
    assert MARK.search(text), "docs/operations.md has no place for the table of metrics"
    return MARK.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
