"""Draw the result of examples.digits.sample: pictures over the scale, and what was measured.

    .venv/bin/python -m examples.digits.plot [RESULT.json OUT.png]

Above, two pictures of each digit for each scale: the same two seeds at every scale. Below, what
the judge sees, and how varied the pictures are, with those of two windows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.digits.images import CLASSES, FOLDER, LEVELS, PIXELS, SIDE, Array, from_text
from examples.digits.sample import RESULT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

OUT = FOLDER.parents[1] / "docs" / "digits.png"
BESIDE = 2
"""Pictures of a digit in a column."""
BLUE, ORANGE, GRAY = "#1f5fa8", "#c2571a", "#777777"
WINDOWS = {
    (0, PIXELS // 2): ("upper half only", "v"),
    (PIXELS // 2, PIXELS): ("lower half only", "^"),
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "lines.markersize": 6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "figure.facecolor": "white",
}
Points = list[dict[str, Any]]


def draw(result: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with pyplot.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.04, hspace=0.02, wspace=0.04)
        figure = pyplot.figure(figsize=(11, 7.2), layout=layout)
        panels: Any = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        above, below = panels
        whole = [p for p in result["points"] if p["scale"] >= 1 and p["end"] - p["start"] == PIXELS]
        draw_pictures(above, whole)
        left, right = below.subplots(1, 2)
        draw_accuracy(left, result, whole)
        draw_variety(right, result, whole)
        save(figure, out)
        pyplot.close(figure)


def draw_pictures(figure: SubFigure, points: Points) -> None:
    """Digits are columns of pairs, scales are rows."""
    axes = figure.subplots(len(points), CLASSES)
    for row, point in zip(axes, points, strict=True):
        for axis, texts in zip(row, point["shown"], strict=True):
            axis.imshow(side_by_side(texts[:BESIDE]), cmap="gray_r", vmin=-0.25, vmax=LEVELS - 1)
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set_visible(False)
        off = "scale 1\n(off)" if point["scale"] == 1 else f"scale {point['scale']:g}"
        row[0].set_ylabel(off, rotation=0, ha="right", va="center", labelpad=8, fontsize=11)
    for label, axis in enumerate(axes[0]):
        axis.set_title(f"<{label}>", fontsize=11, family="monospace")


def side_by_side(texts: list[str]) -> Array:
    """The pictures in a row [8, 8 n + gaps], with a gap between two."""
    gap = np.full((SIDE, 1), np.nan)
    parts = [part for text in texts for part in (from_text(text).reshape(SIDE, SIDE), gap)]
    return np.hstack(parts[:-1])


def draw_accuracy(axis: Axes, result: dict[str, Any], whole: Points) -> None:
    scales = [p["scale"] for p in whole]
    values = [100 * p["accuracy"] for p in whole]
    ends = [[100 * end for end in p["accuracy_interval"]] for p in whole]
    errors = [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
    axis.errorbar(
        scales, values, yerr=errors, color=BLUE, marker="o", capsize=2, label="all pixels"
    )
    for p, label, mark in windows(result):
        axis.plot(p["scale"], 100 * p["accuracy"], mark, color=ORANGE, label=label)
    real = 100 * result["real"]["accuracy"]
    axis.axhline(real, color=GRAY, linestyle=":", label="held-out pictures")
    finish(axis, scales, "The judge sees the digit that was asked for, %")
    axis.legend(frameon=False, fontsize=9, loc="best")


def draw_variety(axis: Axes, result: dict[str, Any], whole: Points) -> None:
    """Both measures as shares of those of the held-out pictures."""
    scales = [p["scale"] for p in whole]
    for name, label, style in (("distance", "distance", "-"), ("kinds", "kinds (Vendi)", "--")):
        real = result["real"][name]
        axis.errorbar(
            scales,
            [100 * p[name] / real for p in whole],
            yerr=[100 * 1.96 * p[f"{name}_error"] / real for p in whole],
            color=BLUE,
            marker="o",
            markerfacecolor=BLUE if style == "-" else "white",
            linestyle=style,
            capsize=2,
            label=f"{label}, all pixels",
        )
    for p, label, mark in windows(result):
        share = 100 * p["distance"] / result["real"]["distance"]
        axis.plot(
            p["scale"], share, mark, color=ORANGE, label=f"distance, {label}" if label else ""
        )
    axis.axhline(100, color=GRAY, linestyle=":")
    finish(axis, scales, "Variety within a class, % of the held-out pictures'")
    axis.legend(frameon=False, fontsize=9, loc="best")


def windows(result: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """The points with a window: point, label (the first time), mark."""
    found: list[tuple[dict[str, Any], str, str]] = []
    for p in result["points"]:
        if (p["start"], p["end"]) in WINDOWS:
            label, mark = WINDOWS[p["start"], p["end"]]
            is_new = all(label != other for _, other, _ in found)
            found.append((p, label if is_new else "", mark))
    return found


def finish(axis: Axes, scales: list[float], title: str) -> None:
    axis.set_xscale("log")
    axis.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axis.xaxis.minorticks_off()
    axis.grid(visible=True)
    axis.set_xlabel("guidance scale (1: off)")
    axis.set_title(title, fontsize=10)


def save(figure: Figure, out: Path) -> None:
    figure.savefig(out, dpi=90, metadata={"Software": None})


def main() -> None:
    source, out = map(Path, sys.argv[1:]) if len(sys.argv) == 3 else (RESULT, OUT)
    draw(json.loads(source.read_text(encoding="utf-8")), out)


if __name__ == "__main__":
    main()
