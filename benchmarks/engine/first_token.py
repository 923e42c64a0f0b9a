"""How long the first token of a long prompt takes that no cache has, in interleaved turns.

The prompt is plain, has a negative of a few tokens or of its own length, or a negative suffix.

    python -m benchmarks.engine.first_token [--model chat] [--prompt 8000] [--turns 3] [--ways ...]
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..llm import guidance, peak_blocks
from ..report import Report, parser
from ..turns import spread, take_turns
from .bench import EMBEDDED, SCALE, Bench, add_options, model_of

SHORT = 16
"""Tokens of a short negative, and of a suffix."""


def fields(bench: Bench, way: str) -> dict[str, Any] | None:
    """The guidance fields of a request. Its negative is a new one each time."""
    short = bench.ids(SHORT)
    return {
        "plain": None,
        "short negative": guidance(SCALE, short),
        "negative of its length": guidance(SCALE, bench.ids(bench.args.prompt)),
        "suffix": {"guidance_scale": SCALE, "negative_suffix_token_ids": short},
    }[way]


WAYS = ("plain", "short negative", "negative of its length", "suffix")


def seconds(bench: Bench, way: str) -> float:
    """From a request with a new prompt to the end of its only token."""
    params, ids = bench.sampling_params(fields(bench, way)), bench.ids(bench.args.prompt)
    start = time.perf_counter()
    bench.send(ids, params)
    while bench.engine.has_unfinished_requests():
        bench.engine.step()
    return time.perf_counter() - start


def main() -> None:
    options = parser(__doc__)
    add_options(options, EMBEDDED, tokens=1, turns=3)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.set_defaults(prompt=8_000)
    args = options.parse_args()
    args.negatives, args.batches = [args.prompt + SHORT], [2]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, model_of(args.model, Path(folder)))
        took = take_turns({way: partial(seconds, bench, way) for way in args.ways}, args.turns)
        scheduler = bench.engine.engine_core.engine_core.scheduler
        blocks = {}
        for way in args.ways:
            with peak_blocks(scheduler) as peak:
                seconds(bench, way)
            blocks[way] = peak()
    report = Report("first token", args)
    report.head("request", "s", "of plain", "least to most", "blocks of plain")
    for way in args.ways:
        ratios = took.ratios(way, "plain")
        report.row(
            way,
            f"{took.median(way):.2f}",
            f"{took.ratio(way, 'plain'):.2f}",
            spread(ratios),
            f"{blocks[way] / blocks['plain']:.3f}",
        )
    report.end(seconds={way: took.values(way) for way in args.ways}, blocks=blocks)


if __name__ == "__main__":
    main()
