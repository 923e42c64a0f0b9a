"""Draw the result of benchmarks.instructions.frontier: the share obeyed against perplexity.

    python -m benchmarks.plots.frontier RESULT.json OUT.svg

Left, the perplexity after the conditional prompt; right, after the neutral one. A line joins the
scales of one limit or cut, or the offsets of one rule. The line of the scale alone is what they
must beat.
"""

from __future__ import annotations

from typing import Any

from ..instructions.frontier import name_of
from .style import panels, results, title

MEASURES = {"perplexity_p90": "after the conditional prompt", "neutral_p90": "after the question"}
ALONE = "scale alone"


def main() -> None:
    (result,), out = results(__doc__, 1)
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in result["points"]:
        lines.setdefault(_line(point["setting"])[0], []).append(point)
    with panels(out, "frontier", 2, height=4.8) as (figure, axes):
        for axis, (measure, words) in zip(axes, MEASURES.items(), strict=True):
            for limit, points in lines.items():
                _draw(axis, limit, points, measure)
            axis.set_xscale("log")
            axis.set_xlabel("perplexity, 90th percentile")
            axis.set_ylabel("instructions obeyed, %")
            title(axis, f"Perplexity {words}")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=7)


def _line(setting: dict[str, Any]) -> tuple[str, float]:
    """The name of the line that a setting belongs to, and its place on it."""
    rest = dict(setting)
    place = rest.pop("guidance_scale", 1.0)
    if rule := rest.get("guidance_rule"):
        place = rule.get("offset", 0.0)
        rest["guidance_rule"] = {"name": rule["name"]}
    return name_of(rest) if rest else ALONE, place


def _draw(axis: Any, limit: str, points: list[dict[str, Any]], measure: str) -> None:
    points = sorted(points, key=lambda p: _line(p["setting"])[1])
    alone = limit == ALONE
    axis.plot(
        [p[measure] for p in points],
        [100 * p["share"] for p in points],
        label=limit,
        marker="o",
        markersize=6 if alone else 3.5,
        linewidth=2.5 if alone else 1,
        zorder=3 if alone else 2,
    )


if __name__ == "__main__":
    main()
