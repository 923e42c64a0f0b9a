"""Write the table of metrics in docs/operations.md from the code that makes them.

python scripts/metrics_page.py
"""

from __future__ import annotations

from pathlib import Path

from page_tables import table, with_block

from deployments.ingress.metric_families import ALL

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"


def page(text: str) -> str:
    """The page with its table up to date, made from its present `text`."""
    cells = (
        (f"`{one.full_name}`", one.kind, ", ".join(one.labels) or "-", one.help) for one in ALL
    )
    return with_block(text, "metrics", table(("metric", "type", "labels", "meaning"), cells))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
