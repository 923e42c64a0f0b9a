"""The table of metrics in docs/operations.md, made from the code that counts them."""

from __future__ import annotations

from pathlib import Path

from page_tables import table, with_blocks

from deployments.ingress.metric_families import ALL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def page(text: str) -> str:
    """The page with its table up to date, made from its present `text`."""
    cells = (
        (f"`{one.full_name}`", one.kind, ", ".join(one.labels) or "-", one.help) for one in ALL
    )
    return with_blocks(text, {"metrics": table(("metric", "type", "labels", "meaning"), cells)})
