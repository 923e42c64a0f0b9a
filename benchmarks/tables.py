"""Print results as tables in Markdown: the card, and each list of rows in them.

    python -m benchmarks.tables [benchmarks/results/decode*.json]

Without files, it lists what there is: benchmark, machine, date and commit of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(column, cell) of one row. Names of nested columns are joined by a space."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name} ")
        elif isinstance(value, list):
            yield prefix + name, ", ".join(cell(item) for item in value)
        else:
            yield prefix + name, cell(value)


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """A table with every column that any of the rows has."""
    cells = [dict(flat(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(name, "-") for name in columns] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(result: Any, name: str = "") -> Iterator[str]:
    """All lists of rows in a result, each with its name."""
    if isinstance(result, list) and result and all(isinstance(row, dict) for row in result):
        yield f"{name}\n\n{table(result)}" if name else table(result)
    elif isinstance(result, dict):
        for key, value in result.items():
            yield from tables(value, f"{name} {key}".strip())


def described(result: Any) -> dict[str, Any]:
    """The card of a result. Older ones have its fields beside the rows, and the first have none."""
    if not isinstance(result, dict):
        return {}
    card: dict[str, Any] = result.get("card") or {
        key: value for key, value in result.items() if isinstance(value, str)
    }
    return card


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        fields = ("machine", "date", "commit")
        paths = sorted(RESULTS.glob("*.json"))
        cards = {path.name: described(json.loads(path.read_text())) for path in paths}
        print(table([{"file": n, **{f: c.get(f, "-") for f in fields}} for n, c in cards.items()]))
    for path in files:
        result = json.loads(path.read_text())
        print(f"# {path.name}\n")
        print(", ".join(f"{key} {value}" for key, value in described(result).items()), end="\n\n")
        if isinstance(result, dict):
            result.pop("card", None)
        print("\n\n".join(tables(result)), end="\n\n")


if __name__ == "__main__":
    main()
