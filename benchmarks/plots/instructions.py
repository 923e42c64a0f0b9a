"""Draw the result of benchmarks.instructions: what guidance gives, and what it costs.

    python -m benchmarks.plots.instructions RESULT.json OUT.svg

Three panels over the scale: the share of instructions that were obeyed, the share of passages that
were believed, and the cost in perplexity. Bars are 95% intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .style import BLUE, DOTTED, GRAY, ORANGE, panels, results, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = {"greedy": (BLUE, "o", 0.985), "sampled": (ORANGE, "s", 1.015)}
"""Color, mark, and a factor on the scale that keeps the bars of the two apart."""
ALONE: dict[str, Any] = {"color": GRAY, "linestyle": DOTTED, "label": "negative alone, greedy"}
MEDIAN: dict[str, Any] = {"linestyle": "-"}
PERCENTILE: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"}
Points = Sequence[dict[str, Any]]


def main() -> None:
    (result,), out = results(__doc__, 1)
    found: Points = result["points"]
    with panels(out, "instructions", 3, height=4.4, below="line", sharex=True) as (figure, axes):
        draw_shares(axes[0], found, "instructions")
        draw_shares(axes[1], found, "context")
        draw_costs(axes[2], found)
        title(axes[0], f"Instructions obeyed ({result['card']['model']})")
        title(axes[1], "Answers from the passage")
        title(axes[2], "Cost in perplexity (instructions)")
        scales = sorted({p["scale"] for p in found if p["scale"] > 0})
        for axis in axes:
            axis.set_xlabel("guidance scale (1: off)")
            axis.set_xscale("log")
            axis.set_xticks(scales, [f"{scale:g}" for scale in scales])
            axis.xaxis.minorticks_off()
        draw_legend(figure)


def draw_shares(axis: Axes, found: Points, table: str) -> None:
    """Shares in percent with their intervals, and that of the negative alone as a line."""
    for mode, (color, mark, beside) in MODES.items():
        rows = _rows(found, table, mode)
        below = [p["share"] - p["interval"][0] for p in rows]
        above = [p["interval"][1] - p["share"] for p in rows]
        axis.errorbar(
            [p["scale"] * beside for p in rows],
            [100 * p["share"] for p in rows],
            # Rounding may leave an end of an interval on the wrong side by a hair.
            yerr=[[100 * max(0.0, length) for length in side] for side in (below, above)],
            color=color,
            marker=mark,
            capsize=2,
            elinewidth=1,
        )
    for p in found:
        if (p["table"], p["scale"]) == (table, 0):
            axis.axhline(100 * p["share"], **ALONE)
    axis.set_ylabel("share, %")
    axis.set_ylim(0, 100)


def draw_costs(axis: Axes, found: Points) -> None:
    """Median and 90th percentile of the perplexity, on a logarithmic axis."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    for mode, (color, mark, _) in MODES.items():
        rows = _rows(found, "instructions", mode)
        scales = [p["scale"] for p in rows]
        for measure, style in (("perplexity_median", MEDIAN), ("perplexity_p90", PERCENTILE)):
            axis.plot(scales, [p[measure] for p in rows], color=color, marker=mark, **style)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("perplexity without guidance")


def draw_legend(figure: Figure) -> None:
    """Below all panels: colors are modes, and lines are measures."""
    from matplotlib.lines import Line2D

    gray: dict[str, Any] = {"color": "#444444", "marker": "o"}
    handles = [
        *(Line2D([], [], color=c, marker=mark, label=mode) for mode, (c, mark, _) in MODES.items()),
        Line2D([], [], **ALONE),
        Line2D([], [], label="perplexity: median", **gray, **MEDIAN),
        Line2D([], [], label="90th percentile", **gray, **PERCENTILE),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def _rows(found: Points, table: str, mode: str) -> list[dict[str, Any]]:
    """The points of a curve, without that of the negative alone."""
    return [p for p in found if (p["table"], p["mode"]) == (table, mode) and p["scale"] > 0]


if __name__ == "__main__":
    main()
