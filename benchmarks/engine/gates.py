"""What closed gates save of a suffix: texts whose gates open at shares of their tokens.

Instructions to the chat model, each with `negative_suffix` of so many tokens, are answered with a
temperature of 1 and seeds, B at a time: where one ends, the next begins. `guided` is the share of
tokens whose gate (`guidance_min_entropy`, in nats) was open. The two columns of tokens per second
are relative to plain requests of the same prompts: with probes, and with the suffix computed for
each token. Their texts are the same. `probes` is their number for each token, `in vain` the share
of them that found its gate open, and `blocks` the most KV blocks of a step, relative to plain.

    python -m benchmarks.engine.gates [--scheduling async] [--batches 1 8] [--suffix 16] [--waves 2]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..instructions.prompts import prompts
from ..llm import CHAT, guided_llm, peak_blocks, set_environment
from ..report import Report, parser
from ..turns import take_turns

set_environment()

ENTROPIES = (6.0, 4.0, 3.0, 2.0, 1.0, 0.0001)
COUNTS = ("guided_tokens", "gate_closed_tokens", "gate_probes", "gate_saved_tokens")
SCALE = 1.5


class Gated:
    """One engine, and the same texts with other gates."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.llm = guided_llm(
            CHAT,
            max_model_len=512,
            max_num_seqs=max(args.batches),
            max_num_batched_tokens=4096,
            async_scheduling=args.scheduling == "async",
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        most = args.waves * max(args.batches)
        self.prompts = [prompt.conditional() for prompt in prompts(most)]

    def seconds(self, batch: int, fields: dict[str, Any] | None, saves: bool = True) -> float:
        """What it takes to make the texts of `waves` times `batch` prompts, `batch` at a time."""
        from vllm import SamplingParams

        texts = self.args.waves * batch
        self.scheduler._probes.saves = saves
        self.scheduler.max_num_active_reqs = batch
        params = [
            SamplingParams(
                max_tokens=self.args.tokens,
                ignore_eos=True,
                temperature=1.0,
                seed=seed,
                extra_args=fields,
            )
            for seed in range(texts)
        ]
        start = time.perf_counter()
        self.llm.chat(self.prompts[:texts], params, use_tqdm=False)
        return time.perf_counter() - start

    def counts(self, batch: int, fields: dict[str, Any] | None) -> dict[str, int]:
        """What is counted while these texts are made, and the most KV blocks of a step."""
        before = self.scheduler.guidance_stats()
        with peak_blocks(self.scheduler) as peak:
            self.seconds(batch, fields)
        after = self.scheduler.guidance_stats()
        counts = {name: after[name] - before[name] for name in COUNTS}
        return {**counts, "blocks": peak()}


def measure(
    gated: Gated, batch: int, entropies: Sequence[float], turns: int
) -> list[dict[str, Any]]:
    """A row for each threshold, from interleaved turns."""
    suffix = list(range(100, 100 + gated.args.suffix))
    fields = {
        entropy: {
            "guidance_scale": SCALE,
            "negative_suffix_token_ids": suffix,
            "guidance_min_entropy": entropy,
        }
        for entropy in entropies
    }
    ways = {"plain": partial(gated.seconds, batch, None)}
    for entropy, its in fields.items():
        ways[f"saving {entropy}"] = partial(gated.seconds, batch, its)
        ways[f"joint {entropy}"] = partial(gated.seconds, batch, its, saves=False)
    took = take_turns(ways, turns)
    plain_blocks, rows = gated.counts(batch, None)["blocks"], []
    for entropy, its in fields.items():
        counts = gated.counts(batch, its)
        probes, tokens = counts["gate_probes"], counts["guided_tokens"]
        closed = counts["gate_saved_tokens"] / len(suffix)
        rows.append(
            {
                "batch": batch,
                "min_entropy": entropy,
                "guided": 1 - counts["gate_closed_tokens"] / tokens,
                "saving": took.ratio("plain", f"saving {entropy}"),
                "joint": took.ratio("plain", f"joint {entropy}"),
                "probes": probes / tokens,
                "blocks": counts["blocks"] / plain_blocks,
                "in_vain": 1 - closed / probes if probes else 0.0,
            }
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--scheduling", choices=["sync", "async"], default="sync")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options.add_argument("--entropies", type=float, nargs="+", default=list(ENTROPIES))
    options.add_argument("--suffix", type=int, default=16, help="tokens of the suffix")
    options.add_argument("--tokens", type=int, default=48, help="tokens of each text")
    options.add_argument("--waves", type=int, default=2, help="texts for each of the B")
    options.add_argument("--turns", type=int, default=5)
    args = options.parse_args()
    gated, report, rows = Gated(args), Report("gates", args), []
    report.head("B", "nats", "guided", "with probes", "without", "probes", "in vain", "blocks")
    for batch in args.batches:
        for row in measure(gated, batch, args.entropies, args.turns):
            rows.append(row)
            report.row(
                batch,
                f"{row['min_entropy']:g}",
                f"{row['guided']:.0%}",
                *(f"{row[name]:.2f}" for name in ("saving", "joint", "probes")),
                f"{row['in_vain']:.0%}",
                f"{row['blocks']:.2f}",
            )
    report.end(rows=rows)


if __name__ == "__main__":
    main()
