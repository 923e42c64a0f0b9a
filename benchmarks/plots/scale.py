"""Draw the results of routing.scale and serving.start.

    python -m benchmarks.plots.scale SCALE.json START.json OUT.svg

Three panels: the time of a router's choice and the share of cached tokens by the number of
replicas, as simulated; the CPU time of Serve's controller and of a router, as measured, with the
line through the measured points; and the CPU time of each process until the first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..routing.scale import line
from .style import BLUE, GRAY, ORANGE, panels, results, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main() -> None:
    (scale, start), out = results(__doc__, 2)
    with panels(out, "scale", 3) as (_, axes):
        draw_choices(axes[0], scale["choices"])
        draw_controller(axes[1], scale["controller"]["rows"])
        draw_start(axes[2], start)


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
    title(axis, "Prompt tokens found cached, and time of a choice")
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
    title(axis, "At rest: measured, and the lines through it")
    axis.legend(frameon=False)


def draw_start(axis: Axes, start: dict[str, Any]) -> None:
    names = sorted(start["cpu_s"], key=lambda name: start["seen"][name], reverse=True)
    axis.barh(names, [start["cpu_s"][name] for name in names], color=BLUE)
    later = [start["cpu_after_s"][name] for name in names]
    axis.barh(names, later, left=[start["cpu_s"][n] for n in names], color=ORANGE, alpha=0.5)
    axis.set(xlabel="CPU-seconds, until and after the first token")
    first = start["phases"]["first token"]
    title(axis, f"A start takes {first:.0f} s on two cores")


if __name__ == "__main__":
    main()
