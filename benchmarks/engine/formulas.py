"""What several streams, windows and cuts cost: decode steps of one interleaved run.

B requests of each kind decode in one engine (greedy, random prompts). `of plain(B)` is their tokens
per second, relative to B plain requests. `of plain(NB)` is relative to a step of N x B plain
requests, as many as there are streams, so it shows what groups cost beyond their streams. For
windows, only steps behind the end are timed.

    python -m benchmarks.engine.formulas [--model chat] [--batches 1 8] [--turns 8] [--out FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..report import Report, parser
from ..turns import take_turns
from .bench import EMBEDDED, Bench, add_options, model_of

WINDOW = 8
"""Output tokens inside of the window."""
BEHIND = "behind a window"

LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    # streams of a request, and its guidance fields beside the followers' prompts
    "plain": (1, {}),
    "2 streams": (2, {}),
    "3 streams": (3, {}),
    "4 streams": (4, {}),
    "8 streams": (8, {}),
    "2 streams, cut": (2, {"guidance_top_k": 50}),
    "2 streams, schedule": (2, {"guidance_schedule": [[i, 1.5 + 0.01 * i] for i in range(64)]}),
    BEHIND: (2, {"guidance_end": WINDOW}),
}


def params(bench: Bench, load: str) -> Any:
    """Those of one request."""
    streams, fields = LOADS[load]
    prompts = [bench.ids(bench.args.prompt) for _ in range(streams - 1)]
    if "guidance_schedule" in fields:
        return bench.sampling_params({**fields, "negative_prompt_token_ids": prompts[0]})
    followers = [{"weight": -0.5 / len(prompts), "token_ids": ids} for ids in prompts]
    return bench.sampling_params({**fields, "guidance_streams": followers} if prompts else None)


def step_ms(bench: Bench, load: str, requests: int) -> float:
    """Milliseconds of the median decode step of that many requests."""
    behind = WINDOW if load == BEHIND else 0
    wall, _ = bench.steps([params(bench, load) for _ in range(requests)], behind)
    return 1000 * statistics.median(wall)


def measure(bench: Bench, batch: int, turns: int) -> list[dict[str, Any]]:
    """A row for each load, from interleaved turns."""
    sizes = sorted({streams for streams, _ in LOADS.values()})
    kinds = {load: (load, batch) for load in LOADS}
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
        }
        for load, (streams, _) in LOADS.items()
    ]


def main() -> None:
    options = parser(__doc__)
    add_options(options, EMBEDDED, tokens=40, turns=8)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = options.parse_args()
    args.negatives = [args.prompt]
    most = max(streams for streams, _ in LOADS.values())
    batches, args.batches = args.batches, [most * max(args.batches)]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, model_of(args.model, Path(folder)))
        report = Report("formulas", args)
        report.head("B", "requests", "step, ms", "tokens/s, of plain(B)", "of plain(NB)")
        rows = []
        for batch in batches:
            for row in measure(bench, batch, args.turns):
                rows.append(row)
                ratios = (f"{row[name]:.2f}" for name in ("of_plain", "of_streams"))
                report.row(batch, row["load"], f"{row['ms']:.1f}", *ratios)
        report.end(batches=batches, rows=rows)


if __name__ == "__main__":
    main()
