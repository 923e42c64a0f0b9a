"""Draw the results of engine.decode, serving.http and serving.ceiling.

    python -m benchmarks.plots.speed GREEDY.json SAMPLED.json HTTP.json CEILING.json OUT.svg

Three panels: how many times faster a step of B groups is than one of 2B plain requests, with ranges
over the turns; what the way from client to engine adds, by the number of clients; and the tokens a
second that the path can carry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .style import BLUE, DOTTED, GRAY, ORANGE, panels, results, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERVERS = {"vllm serve": GRAY, "haproxy": BLUE, "proxy": ORANGE}
NAMES = {"vllm serve": "vllm serve", "haproxy": "ours, HAProxy", "proxy": "ours, Serve's proxy"}
CALLS = {"through Serve": ORANGE, "direct": BLUE}


def main() -> None:
    (greedy, sampled, http, ceiling), out = results(__doc__, 4)
    with panels(out, "speed", 3) as (_, axes):
        draw_parity(axes[0], {"greedy": greedy, "top-p 0.95": sampled})
        draw_added(axes[1], http["rows"])
        draw_ceilings(axes[2], ceiling["rows"])


def draw_parity(axis: Axes, results: dict[str, dict[str, Any]]) -> None:
    for (name, result), color, mark, beside in zip(
        results.items(), (BLUE, ORANGE), "os", (0.97, 1.03), strict=True
    ):
        rows = result["rows"]
        middle = [row["parity"] for row in rows]
        ends = [row["parity_range"] for row in rows]
        axis.errorbar(
            [row["batch"] * beside for row in rows],
            middle,
            yerr=[
                [m - low for m, (low, _) in zip(middle, ends, strict=True)],
                [high - m for m, (_, high) in zip(middle, ends, strict=True)],
            ],
            color=color,
            marker=mark,
            capsize=2,
            elinewidth=1,
            label=name,
        )
    axis.axhline(1, color=GRAY, linestyle=DOTTED)
    batches = sorted({row["batch"] for result in results.values() for row in result["rows"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_ylim(0, None)
    title(axis, "Step of 2B plain requests : step of B groups")
    axis.set_xlabel("groups B")
    axis.legend(frameon=False, fontsize=9, loc="lower right")


def draw_added(axis: Axes, rows: list[dict[str, Any]]) -> None:
    width = 0.8 / len(SERVERS)
    for number, (server, color) in enumerate(SERVERS.items()):
        values = [row[server]["added_p50_ms"] for row in rows]
        places = [place + (number - 1) * width for place in range(len(rows))]
        bars = axis.bar(places, values, width, color=color, label=NAMES[server])
        axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    axis.set_yscale("log")
    axis.set_ylim(1, 600)
    axis.set_yticks([1, 10, 100], ["1", "10", "100"])
    axis.set_xticks(range(len(rows)), [str(row["clients"]) for row in rows])
    axis.grid(visible=False, axis="x")
    title(axis, "ms beyond the engine's own time, median")
    axis.set_xlabel("clients on the same two cores")
    axis.legend(frameon=False, fontsize=9, loc="upper left")


def draw_ceilings(axis: Axes, rows: list[dict[str, Any]]) -> None:
    parts = list(dict.fromkeys(row["part"] for row in rows))
    for number, (calls, color) in enumerate(CALLS.items()):
        rates = [sorted(row["tokens_per_s"]) for row in rows if row["calls"] == calls]
        values = [rate[len(rate) // 2] for rate in rates]
        places = [place + (number - 0.5) * 0.4 for place in range(len(parts))]
        bars = axis.bar(places, values, 0.4, color=color, label=f"calls {calls}")
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=1)
    axis.set_xticks(range(len(parts)), [f"one {part}" for part in parts])
    axis.grid(visible=False, axis="x")
    title(axis, "tokens/s, if the engine costs nothing")
    axis.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    main()
