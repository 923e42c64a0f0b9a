"""What the pictures share: colors, fonts, and a row of panels that is written to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GRAY = "#1f5fa8", "#c2571a", "#777777"
DOTTED = (0, (1, 2))
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "xtick.labelsize": 8,
    "lines.markersize": 5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "figure.facecolor": "white",
}


def results(doc: str | None, number: int) -> tuple[list[dict[str, Any]], Path]:
    """The results that the command line names, and the picture that it names last."""
    if len(sys.argv) != 2 + number:
        sys.exit(doc)
    *paths, out = map(Path, sys.argv[1:])
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths], out


@contextmanager
def panels(
    out: Path, salt: str, number: int, *, height: float = 4.2, below: Any = True, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with so many panels side by side; it is written to `out` at the end of the block.

    salt: makes the ids of the SVG's elements. below: `axes.axisbelow`, what the grid is below.
    options: of pyplot.subplots.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({**STYLE, "svg.hashsalt": salt, "axes.axisbelow": below}):
        size = (4 * number, height)
        figure, axes = pyplot.subplots(
            1, number, figsize=size, layout="constrained", squeeze=False, **options
        )
        yield figure, list(axes[0])
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)


def title(axis: Axes, text: str) -> None:
    axis.set_title(text, fontsize=10)
