"""What streams, windows, cuts, limits, rules and suffixes cost: steps of one interleaved run.

B requests of each kind decode in one engine (greedy, random prompts). `of plain(B)` is their tokens
per second, relative to B plain requests. `of plain(NB)` is relative to a step of N x B plain
requests, as many as there are streams, so it shows what groups cost beyond their streams. `of a
pair` is relative to B pairs with one scale, which are blended before the head, and `of rows` to B
pairs whose scale is too large for that: both their rows go through the head, as with limits and
rules. For windows, only steps behind the end are timed.

    python -m benchmarks.engine.formulas [--model chat] [--batches 1 8] [--turns 8] [--out FILE]
    python -m benchmarks.engine.formulas --loads max_kl min_entropy adacad arr nwcad --batches 1 32
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..report import Report, parser
from ..turns import take_turns
from .bench import EMBEDDED, SCALE, Bench, add_options, model_of

WINDOW = 8
"""Output tokens inside of the window."""
BEHIND = "behind a window"

ADACAD = {"name": "adacad", "offset": 1}
NWCAD = {
    "name": "nwcad",
    "max_divergence": 0.1,
    "negative_margin": 0.5,
    "conditional_margin": 0.5,
}

SUFFIX = "negative_suffix_token_ids"
AFTER_HEAD = "2 streams, scale 12"
"""A pair whose weights are too large to be blended before the head."""

LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    # streams of a request, and its guidance fields beside the followers' prompts
    "plain": (1, {}),
    "2 streams": (2, {}),
    "3 streams": (3, {}),
    "4 streams": (4, {}),
    "8 streams": (8, {}),
    AFTER_HEAD: (2, {"guidance_scale": 12.0}),
    "2 streams, cut": (2, {"guidance_top_k": 50}),
    "2 streams, schedule": (2, {"guidance_schedule": [[i, 1.5 + 0.01 * i] for i in range(64)]}),
    BEHIND: (2, {"guidance_end": WINDOW}),
    "2 streams, max_kl": (2, {"guidance_max_kl": 0.5}),
    "2 streams, min_entropy": (2, {"guidance_min_entropy": 1.0}),
    "2 streams, adacad": (2, {"guidance_rule": {"name": "adacad"}}),
    "2 streams, arr": (2, {"guidance_rule": {"name": "arr"}}),
    "2 streams, nwcad": (2, {"guidance_scale": 1.5, "guidance_rule": NWCAD}),
    "2 streams, adacad, max_kl": (2, {"guidance_rule": ADACAD, "guidance_max_kl": 0.5}),
    "suffix of 1": (1, {SUFFIX: [100]}),
    "suffix of 4": (1, {SUFFIX: list(range(100, 104))}),
    "suffix of 16": (1, {SUFFIX: list(range(100, 116))}),
}


RATIOS = ("of_plain", "of_streams", "of_pair", "of_rows")
TITLES = ("tokens/s, of plain(B)", "of plain(NB)", "of a pair", "of rows")


def params(bench: Bench, load: str) -> Any:
    """Those of one request."""
    streams, fields = LOADS[load]
    prompts = [bench.ids(bench.args.prompt) for _ in range(streams - 1)]
    if SUFFIX in fields:
        return bench.sampling_params({**fields, "guidance_scale": SCALE})
    if fields.keys() & {"guidance_scale", "guidance_schedule", "guidance_rule"}:
        return bench.sampling_params({**fields, "negative_prompt_token_ids": prompts[0]})
    followers = [{"weight": -0.5 / len(prompts), "token_ids": ids} for ids in prompts]
    return bench.sampling_params({**fields, "guidance_streams": followers} if prompts else None)


def step_ms(bench: Bench, load: str, requests: int) -> float:
    """Milliseconds of the median decode step of that many requests."""
    behind = WINDOW if load == BEHIND else 0
    wall, _ = bench.steps([params(bench, load) for _ in range(requests)], behind)
    return 1000 * statistics.median(wall)


def chosen(parts: Sequence[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    """The loads whose name has one of these parts, behind those that they are compared with."""
    compared = ("plain", "2 streams", AFTER_HEAD)
    return {
        load: one
        for load, one in LOADS.items()
        if not parts or load in compared or any(part in load for part in parts)
    }


def measure(bench: Bench, batch: int, turns: int, parts: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each load, from interleaved turns."""
    loads = chosen(parts)
    sizes = sorted({streams for streams, _ in loads.values()})
    kinds = {load: (load, batch) for load in loads}
    kinds |= {f"{n} x plain": ("plain", n * batch) for n in sizes[1:]}
    ways = {name: partial(step_ms, bench, *kind) for name, kind in kinds.items()}
    took = take_turns(ways, turns)
    return [
        {
            "batch": batch,
            "load": load,
            "ms": took.median(load),
            "of_plain": took.ratio("plain", load),
            "of_streams": took.ratio("plain" if streams == 1 else f"{streams} x plain", load),
            "of_pair": took.ratio("2 streams", load),
            "of_rows": took.ratio(AFTER_HEAD, load),
        }
        for load, (streams, _) in loads.items()
    ]


def main() -> None:
    options = parser(__doc__)
    add_options(options, (*EMBEDDED, "0.6b"), tokens=40, turns=8)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options.add_argument("--loads", nargs="+", default=[], help="only those with these parts")
    args = options.parse_args()
    args.negatives = [args.prompt]
    most = max(streams for streams, _ in chosen(args.loads).values())
    batches, args.batches = args.batches, [most * max(args.batches)]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, model_of(args.model, Path(folder)))
        report = Report("formulas", args)
        report.head("B", "requests", "step, ms", *TITLES)
        rows = []
        for batch in batches:
            for row in measure(bench, batch, args.turns, args.loads):
                rows.append(row)
                ratios = (f"{row[name]:.2f}" for name in RATIOS)
                report.row(batch, row["load"], f"{row['ms']:.1f}", *ratios)
        report.end(batches=batches, rows=rows)


if __name__ == "__main__":
    main()
