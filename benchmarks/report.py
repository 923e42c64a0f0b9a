"""What a benchmark prints: a card, a table that grows, and one line of JSON at its end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .card import card


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring. It has the option `--out`."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="a file for the line of JSON")
    return made


class Report:
    """The output of one run.

    name: that of the benchmark, in the JSON. described: what the card says besides the machine.
    """

    def __init__(self, name: str, args: argparse.Namespace, **described: Any) -> None:
        self._name, self._args = name, args
        self.card: dict[str, Any] = {**card(), **described}
        print(json.dumps(self.card), flush=True)

    def head(self, *columns: str) -> None:
        """Begin a table."""
        self.row(*columns)
        self.row(*["---"] * len(columns))

    def row(self, *cells: object) -> None:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)

    def end(self, **found: Any) -> None:
        """Print the line of JSON, with the card and the options, and write it to `--out`."""
        hidden = ("out", *found)
        options = {key: value for key, value in vars(self._args).items() if key not in hidden}
        told = {"benchmark": self._name, "card": self.card, **options, **found}
        line = json.dumps(told, default=str)
        print(line)
        if self._args.out:
            self._args.out.write_text(line + "\n", encoding="utf-8")
