"""Draw the result of benchmarks.instructions.frontier: the share obeyed against perplexity.

    python -m benchmarks.plots.frontier RESULT.json OUT.svg

Left, the perplexity after the conditional prompt; right, after the neutral one. A line joins the
scales of one limit, rule or cut. The first line, without any of these, is what they must beat.
"""

from __future__ import annotations

from typing import Any

from .style import panels, results, title

MEASURES = {"perplexity_p90": "after the conditional prompt", "neutral_p90": "after the question"}
SCALE = "guidance_scale"


def main() -> None:
    (result,), out = results(__doc__, 1)
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in result["points"]:
        rest = {name: value for name, value in point["setting"].items() if name != SCALE}
        named = (f"{name.removeprefix('guidance_')} {value}" for name, value in rest.items())
        lines.setdefault(", ".join(named) or "scale alone", []).append(point)
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


def _draw(axis: Any, limit: str, points: list[dict[str, Any]], measure: str) -> None:
    points = sorted(points, key=lambda p: p["setting"].get(SCALE, 1.0))
    alone = limit == "scale alone"
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
