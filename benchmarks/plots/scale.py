"""Draw the results of bench_scale.py and bench_start.py.

    python benchmarks/plot_scale.py SCALE.json START.json OUT.svg

Three panels: the time of a router's choice and the share of cached tokens by the number of
replicas, as simulated; the CPU time of Serve's controller and of a router, as measured, with the
line through the measured points; and the CPU time of each process until the first token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_scale import line
from plot_instructions import STYLE
from plot_speed import BLUE, GRAY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(scale: dict[str, Any], start: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({**STYLE, "svg.hashsalt": "scale", "axes.axisbelow": True}):
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
        draw_choices(axes[0], scale["choices"])
        draw_controller(axes[1], scale["controller"]["rows"])
        draw_start(axes[2], start)
        figure.savefig(out, metadata=None if out.suffix == ".png" else {"Date": None})
        pyplot.close(figure)


def draw_choices(axis: Axes, rows: list[dict[str, Any]]) -> None:
    replicas = [row["replicas"] for row in rows]
    axis.plot(replicas, [row["hits"] for row in rows], color=BLUE, marker="o", label="ours")
    p2c = [row["hits_p2c"] for row in rows]
    axis.plot(replicas, p2c, color=ORANGE, marker="s", label="power of two choices")
    for row in rows:
        at = (row["replicas"], row["hits"])
        text = f"{row['choice_us'] / 1000:.1f} ms"
        axis.annotate(text, at, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    axis.set(xscale="log", ylim=(0, 0.8), xlabel="replicas (simulated)")
    axis.set_title("Prompt tokens found cached, and time of a choice", fontsize=10)
    axis.legend(frameon=False)


def draw_controller(axis: Axes, rows: list[dict[str, Any]]) -> None:
    replicas = [row["replicas"] for row in rows]
    for name, color, label in (
        ("controller", ORANGE, "Serve's controller"),
        ("router", BLUE, "one router"),
    ):
        values = [row[name] for row in rows]
        fixed, each = line(replicas, values)
        axis.plot(replicas, values, color=color, marker="o", linestyle="", label=label)
        sizes = [2**power for power in range(2, 11)]
        axis.plot(sizes, [fixed + each * n for n in sizes], color=color, linestyle=":")
    axis.axhline(1.0, color=GRAY, linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="replicas", ylabel="CPU-seconds a second")
    axis.set_title("At rest: measured, and the lines through it", fontsize=10)
    axis.legend(frameon=False)


def draw_start(axis: Axes, start: dict[str, Any]) -> None:
    names = sorted(start["cpu_s"], key=lambda name: start["seen"][name], reverse=True)
    axis.barh(names, [start["cpu_s"][name] for name in names], color=BLUE)
    later = [start["cpu_after_s"][name] for name in names]
    axis.barh(names, later, left=[start["cpu_s"][n] for n in names], color=ORANGE, alpha=0.5)
    axis.set(xlabel="CPU-seconds, until and after the first token")
    first = start["phases"]["first token"]
    axis.set_title(f"A start takes {first:.0f} s on two cores", fontsize=10)


def main() -> None:
    *results, out = map(Path, sys.argv[1:])
    scale, start = (json.loads(path.read_text()) for path in results)
    draw(scale, start, out)


if __name__ == "__main__":
    main()
