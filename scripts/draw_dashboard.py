"""Draw the Grafana dashboard from a Prometheus, without Grafana: the same grid, panels and queries.

    python scripts/draw_dashboard.py http://127.0.0.1:9090 --minutes 10 --out dashboard.png

It is for pictures in documents, and to look at the panels where no Grafana can be installed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_api import Series, filled_in, over

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHBOARD = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "cfg-serve.json"
COLUMNS = 24
BACKGROUND, CARD, TEXT, FAINT = "#111217", "#181b1f", "#d8d9da", "#8e8e96"
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#5794f2", "#96d98d")
GREEN, RED = "#73bf69", "#f2495c"
POINTS = 240
INCH_PER_COLUMN, INCH_PER_ROW = 0.62, 0.36
DPI = 75
PALETTE = 200
"""Colours of a PNG."""


def queried(
    url: str, panel: dict[str, Any], start: float, end: float, window: str
) -> list[tuple[str, Series]]:
    """The series of a panel, with what Grafana calls them."""
    found = []
    for target in panel["targets"]:
        expr = filled_in(target["expr"], window=window)
        for series in over(url, expr, start, end, (end - start) / POINTS):
            found.append((_legend(target["legendFormat"], series), series))
    return found


def _legend(template: str, series: Series) -> str:
    for label, value in series.labels.items():
        template = template.replace(f"{{{{{label}}}}}", value)
    return template


def worded(value: float, unit: str) -> str:
    """A value with its unit, as Grafana words it."""
    if math.isnan(value):
        return ""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    per_second = " /s" if unit == "reqps" else ""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[letter]
            return f"{value / scale:.3g} {letter}{per_second}"
    return f"{value:.4g}{per_second}" if value >= 100 else f"{value:.3g}{per_second}"


def draw(url: str, start: float, end: float, window: str) -> Figure:
    """The whole dashboard between two times; window: of rates."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    told = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = told["panels"]
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) + 1
    size = COLUMNS * INCH_PER_COLUMN, rows * INCH_PER_ROW
    figure = pyplot.figure(figsize=size, facecolor=BACKGROUND)
    for panel in panels:
        place = panel["gridPos"]
        left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
        bottom = 1 - (place["y"] + place["h"] + 0.5) / rows
        height = place["h"] / rows
        if panel["type"] == "row":
            middle = bottom + height / 2
            figure.text(
                left + 0.006, middle, f"▾ {panel['title']}", color=TEXT, fontsize=11, va="center"
            )
            continue
        _card(figure, left, bottom, width, height, panel["title"])
        found = queried(url, panel, start, end, window)
        if panel["type"] == "stat":
            _stat(figure, (left, bottom, width, height), panel, found)
        else:
            x, y = 0.052, 0.23 * height
            inner = (left + x, bottom + y, width - x - 0.012, 0.58 * height)
            axes = figure.add_axes(inner, facecolor=CARD)
            _chart(axes, panel, found, (start, end))
            columns = 2 if place["w"] < 8 else 3 if place["w"] < 12 else 4
            _names(figure, axes, left + 0.006, bottom + 0.135 * height, columns)
    return figure


def _card(
    figure: Figure, left: float, bottom: float, width: float, height: float, title: str
) -> None:
    from matplotlib.patches import Rectangle

    gap_x, gap_y = 0.002, 0.0012
    card = Rectangle(
        (left + gap_x, bottom + gap_y),
        width - 2 * gap_x,
        height - 2 * gap_y,
        transform=figure.transFigure,
        facecolor=CARD,
        edgecolor="#2c3235",
        zorder=-1,
    )
    figure.add_artist(card)
    top = bottom + height - gap_y * 3
    figure.text(left + 0.007, top, title, color=TEXT, fontsize=9.5, va="top", weight="bold")


def _stat(
    figure: Figure,
    place: tuple[float, float, float, float],
    panel: dict[str, Any],
    found: list[tuple[str, Series]],
) -> None:
    left, bottom, width, height = place
    value = _last(found[0][1].values) if found else math.nan
    defaults = panel["fieldConfig"]["defaults"]
    colour = GREEN
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is not None and value >= step["value"]:
            colour = RED
    middle = bottom + 0.55 * height
    words = worded(value, defaults["unit"]) if found else "No data"
    figure.text(
        left + width / 2, middle, words, color=colour, fontsize=20, ha="center", va="center"
    )
    if found:
        axes = figure.add_axes((left + 0.004, bottom + 0.06 * height, width - 0.008, 0.28 * height))
        axes.set_axis_off()
        times, values = found[0][1].times, found[0][1].values
        axes.plot(times, values, color=colour, linewidth=1)
        axes.fill_between(times, values, color=colour, alpha=0.25)
        axes.set_ylim(bottom=0)


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if not math.isnan(value)), math.nan)


def _chart(
    axes: Axes, panel: dict[str, Any], found: list[tuple[str, Series]], between: tuple[float, float]
) -> None:
    from matplotlib.dates import DateFormatter
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    below: dict[float, float] = {}
    for i, (legend, series) in enumerate(found):
        colour = COLOURS[i % len(COLOURS)]
        values = [0.0 if stacked and math.isnan(v) else v for v in series.values]
        base = [below.get(at, 0.0) if stacked else 0.0 for at in series.times]
        tops = [low + value for low, value in zip(base, values, strict=True)]
        dates = [_date(at) for at in series.times]
        label = f"{legend}: {worded(_last(series.values), defaults['unit'])}"
        is_shown = len(found) <= 4 or any(values)  # no legend for one of many that is 0
        axes.plot(dates, tops, color=colour, linewidth=1.2, label=label if is_shown else None)
        axes.fill_between(dates, base, tops, color=colour, alpha=0.25 if stacked else 0.06)
        below.update(zip(series.times, tops, strict=True))
    axes.set_xlim(*map(_date, between))
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    if axes.get_ylim()[1] < 1e-9 or not below:
        axes.set_ylim(0, 1)
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: worded(v, defaults["unit"])))
    axes.tick_params(colors=FAINT, labelsize=7.5, length=0)
    axes.grid(color="#2c3235", linewidth=0.5)
    for side in axes.spines.values():
        side.set_visible(False)
    if not found:
        axes.text(0.5, 0.5, "No data", color=FAINT, transform=axes.transAxes, ha="center")


def _names(figure: Figure, axes: Axes, left: float, top: float, columns: int) -> None:
    """Write the names of the series below a chart."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(left, top),
            bbox_transform=figure.transFigure,
            borderaxespad=0,
            ncol=columns,
            fontsize=7.5,
            frameon=False,
            labelcolor=TEXT,
            handlelength=1,
            columnspacing=1,
            labelspacing=0.25,
        )


def _date(at: float) -> Any:
    """Matplotlib's number for a time: days since 1970, UTC."""
    return at / 86400


def main() -> None:
    """Parse the command line, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of Prometheus")
    parser.add_argument("--minutes", type=float, default=10, help="until now")
    parser.add_argument("--window", default="30s", help="of rates, in place of 5m")
    parser.add_argument("--out", default="dashboard.png")
    args = parser.parse_args()
    end = time.time()
    figure = draw(args.url, end - 60 * args.minutes, end, args.window)
    figure.savefig(args.out, dpi=DPI, facecolor=BACKGROUND)
    if args.out.endswith(".png"):
        _shrink(Path(args.out))


def _shrink(picture: Path) -> None:
    """Write the picture again with a palette, in a third of the bytes."""
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(PALETTE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    main()
