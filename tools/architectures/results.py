"""What was measured: one JSON object a line, for each row of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results.jsonl"
NUM_CASES = 24

Result = dict[str, Any]


def load(path: Path = RESULTS) -> dict[str, Result]:
    """The last result of each row, by its label."""
    if not path.exists():
        return {}
    found = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {result["row"]: result for result in found}


def append(result: Result, path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def tidy(labels: Sequence[str], path: Path) -> None:
    """Keep the last result of each of these rows, in their order."""
    found = load(path)
    kept = [json.dumps(found[label]) + "\n" for label in labels if label in found]
    path.write_text("".join(kept), encoding="utf-8")
