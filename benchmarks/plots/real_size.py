"""Draw the results of benchmarks.real_size.

    python -m benchmarks.plots.real_size RESULT.json OUT.svg

Four panels: how many times faster a step of B groups is than one of 2B plain requests; how many
times longer a guided request takes than a plain one, by the length of its two cached prompts; how
long another client's tiny request waits; and the CPU time of the first use of a grammar. Panels
without results are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .style import BLUE, DOTTED, GRAY, ORANGE, panels, results, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (BLUE, ORANGE, GRAY)
Rows = list[dict[str, Any]]


def by_vocabulary(rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    """(name, color, rows) of each vocabulary."""
    sizes = sorted({row["vocabulary"] for row in rows})
    for size, color in zip(sizes, COLORS, strict=False):
        yield f"{size:,}", color, [row for row in rows if row["vocabulary"] == size]


def draw_decode(axis: Axes, result: dict[str, Any]) -> None:
    for name, color, rows in by_vocabulary(result["decode"]):
        batches = [row["batch"] for row in rows]
        axis.plot(batches, [r["parity"] for r in rows], color=color, marker="o", label=name)
    axis.axhline(1, color=GRAY, linestyle=DOTTED)
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set(ylim=(0, None), xlabel="groups B")
    title(axis, "Step of 2B plain requests : step of B groups")
    axis.legend(frameon=False, fontsize=9, title="vocabulary")


def draw_lengths(axis: Axes, result: dict[str, Any]) -> None:
    for part, where, style in (("first", "offline", "-"), ("http", "HTTP", ":")):
        for name, color, rows in by_vocabulary(result.get(part, [])):
            lengths = [row["tokens"] for row in rows]
            values = [row["guided_over_plain"] for row in rows]
            label = f"{where}, {name}"
            axis.plot(lengths, values, color=color, marker="o", linestyle=style, label=label)
    axis.axhline(2, color=GRAY, linestyle=DOTTED)
    axis.set(xscale="log", ylim=(0, None), xlabel="tokens of prompt and of negative, cached")
    title(axis, "First token, guided : plain")
    axis.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)


def draw_waits(axis: Axes, result: dict[str, Any]) -> None:
    rows = next(rows for _, _, rows in by_vocabulary(result["http"]))
    lengths = [row["tokens"] for row in rows]
    for key, color in zip(rows[0]["tiny_request_ms"], (GRAY, BLUE, ORANGE), strict=True):
        values = [row["tiny_request_ms"][key] for row in rows]
        axis.plot(lengths, values, color=color, marker="o", label=key)
    axis.set(xscale="log", ylim=(0, None), xlabel="tokens of prompt and of negative, cached")
    title(axis, "Another client's tiny request, ms")
    axis.legend(frameon=False, fontsize=9)


def draw_grammars(axis: Axes, result: dict[str, Any]) -> None:
    found = list(by_vocabulary(result["structured"]))
    for number, (name, color, rows) in enumerate(found):
        places = [place + 0.8 * number / len(found) for place in range(len(rows))]
        values = [row["first"]["cpu_s"] for row in rows]
        bars = axis.barh(places, values, 0.8 / len(found), color=color, label=name)
        refused = ["" if row["first"]["status"] == 200 else "refused" for row in rows]
        axis.bar_label(bars, refused, fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), [row["grammar"] for row in rows], fontsize=8)
    axis.set(xlabel="CPU-seconds of the replica")
    title(axis, "First use of a grammar")
    axis.legend(frameon=False, fontsize=9, title="vocabulary")


PANELS: dict[Callable[[Any, dict[str, Any]], None], set[str]] = {
    draw_decode: {"decode"},
    draw_lengths: {"first", "http"},
    draw_waits: {"http"},
    draw_grammars: {"structured"},
}


def main() -> None:
    (result,), out = results(__doc__, 1)
    shown = [panel for panel, parts in PANELS.items() if parts & result.keys()]
    with panels(out, "real size", len(shown)) as (_, axes):
        for panel, axis in zip(shown, axes, strict=True):
            panel(axis, result)


if __name__ == "__main__":
    main()
