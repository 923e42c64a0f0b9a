"""What several streams, windows and cuts cost: decode steps of one interleaved run.

B requests of each kind decode in one engine (greedy, random prompts). `of plain(B)` is their tokens
per second, relative to B plain requests. `of plain(NB)` is relative to a step of N x B plain
requests, as many as there are streams, so it shows what groups cost beyond their streams. For
windows, only steps behind the end are timed.

    python benchmarks/bench_formulas.py [--model chat] [--batches 1 8] [--turns 8] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench_decode import MODELS, SKIPPED, Bench, model_of
from card import card, vllm_version

WINDOW = 8
"""Output tokens inside of the window."""

LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    # streams of a request, and its guidance fields beside the followers' prompts
    "plain": (1, {}),
    "2 streams": (2, {}),
    "3 streams": (3, {}),
    "4 streams": (4, {}),
    "8 streams": (8, {}),
    "2 streams, cut": (2, {"guidance_top_k": 50}),
    "2 streams, schedule": (2, {"guidance_schedule": [[i, 1.5 + 0.01 * i] for i in range(64)]}),
    "behind a window": (2, {"guidance_end": WINDOW}),
}


class FormulaBench(Bench):
    """An engine, and loads of requests with any formula."""

    load = "plain"

    def _add(self, negative: int) -> None:
        from vllm import SamplingParams

        streams, fields = LOADS[self.load]
        extra: dict[str, Any] | None = None
        if "guidance_schedule" in fields:
            extra = {**fields, "negative_prompt_token_ids": self._ids(negative)}
        elif streams > 1:
            prompts = [self._ids(negative) for _ in range(streams - 1)]
            followers = [{"weight": -0.5 / len(prompts), "token_ids": ids} for ids in prompts]
            extra = {**fields, "guidance_streams": followers}
        params = SamplingParams(
            max_tokens=self._args.tokens, ignore_eos=True, temperature=0.0, extra_args=extra
        )
        self._send(self._ids(self._args.prompt), params)

    def step_ms(self, load: str, requests: int) -> float:
        """Milliseconds of the median decode step of that many requests."""
        self.load = load
        behind = WINDOW if load == "behind a window" else 0
        wall, _ = self.steps(requests, self._args.prompt)
        return 1000 * statistics.median(wall[SKIPPED + behind : -SKIPPED])


def measure(bench: FormulaBench, batch: int, turns: int) -> list[dict[str, Any]]:
    """A row for each load, from interleaved turns."""
    sizes = sorted({streams for streams, _ in LOADS.values()})
    kinds = [(load, batch) for load in LOADS] + [("plain", n * batch) for n in sizes[1:]]
    took: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + 1):
        for kind in kinds if turn % 2 else reversed(kinds):
            took[kind].append(bench.step_ms(*kind))

    def ratio(of: tuple[str, int], to: tuple[str, int]) -> float:
        pairs = zip(took[of][1:], took[to][1:], strict=True)  # the first turn warms up
        return statistics.median(a / b for a, b in pairs)

    return [
        {
            "batch": batch,
            "load": load,
            "ms": statistics.median(took[load, batch][1:]),
            "of_plain": ratio(("plain", batch), (load, batch)),
            "of_streams": ratio(("plain", streams * batch), (load, batch)),
        }
        for load, (streams, _) in LOADS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="chat")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    args.negatives = [args.prompt]
    most = max(streams for streams, _ in LOADS.values())
    batches, args.batches = args.batches, [most * max(args.batches)]
    with tempfile.TemporaryDirectory() as folder:
        bench = FormulaBench(args, model_of(args.model, Path(folder)))
        described = {**card(), "vllm": vllm_version()}
        print(json.dumps(described))
        print("| B | requests | step, ms | tokens/s, of plain(B) | of plain(NB) |")
        print("|---|---|---|---|---|")
        rows = []
        for batch in batches:
            for row in measure(bench, batch, args.turns):
                rows.append(row)
                print(
                    f"| {batch} | {row['load']} | {row['ms']:.1f} | {row['of_plain']:.2f} |"
                    f" {row['of_streams']:.2f} |",
                    flush=True,
                )
    options = {"model": args.model, "dtype": args.dtype, "tokens": args.tokens}
    result = json.dumps({"benchmark": "formulas", "card": described, **options, "rows": rows})
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
