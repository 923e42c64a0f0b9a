"""Draw the results of bench_decode.py, bench_http.py and bench_ceiling.py.

    python benchmarks/plot_speed.py GREEDY.json SAMPLED.json HTTP.json CEILING.json OUT.svg

Three panels: how many times faster a step of B groups is than one of 2B plain requests, with ranges
over the turns; what the way from client to engine adds, by the number of clients; and the tokens a
second that the path can carry.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plot_instructions import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GRAY = "#1f5fa8", "#c2571a", "#777777"
SERVERS = {"vllm serve": GRAY, "haproxy": BLUE, "proxy": ORANGE}
NAMES = {"vllm serve": "vllm serve", "haproxy": "ours, HAProxy", "proxy": "ours, Serve's proxy"}
CALLS = {"through Serve": ORANGE, "direct": BLUE}


def draw(results: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    greedy, sampled, http, ceiling = results
    with pyplot.rc_context({**STYLE, "svg.hashsalt": "speed", "axes.axisbelow": True}):
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
        draw_parity(axes[0], {"greedy": greedy, "top-p 0.95": sampled})
        draw_added(axes[1], http["rows"])
        draw_ceilings(axes[2], ceiling["rows"])
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)


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
    axis.axhline(1, color=GRAY, linestyle=(0, (1, 2)))
    batches = sorted({row["batch"] for result in results.values() for row in result["rows"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_ylim(0, None)
    axis.set_title("Step of 2B plain requests : step of B groups", fontsize=10)
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
    axis.set_title("ms beyond the engine's own time, median", fontsize=10)
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
    axis.set_title("tokens/s, if the engine costs nothing", fontsize=10)
    axis.legend(frameon=False, fontsize=9)


def main() -> None:
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    *paths, out = map(Path, sys.argv[1:])
    draw([json.loads(path.read_text(encoding="utf-8")) for path in paths], out)


if __name__ == "__main__":
    main()
