"""What closed gates save of a suffix: texts whose gates open at shares of their tokens.

Instructions to the model, each with `negative_suffix` of so many tokens, are answered with a
temperature of 1 and seeds, B at a time: where one ends, the next begins. Gates
(`guidance_min_entropy`, in nats) are set for shares of guided tokens: at quantiles of the entropies
of plain texts of the same prompts. `guided` is the share of tokens whose gate was open. The two
columns of tokens per second are relative to those plain texts: with probes, and with the suffix
computed for each token. Their texts are the same. `probes` is their number for each token, `in
vain` the share of them that found its gate open, and `blocks` the most KV blocks of a step,
relative to plain.

    python -m benchmarks.engine.gates [--model chat|300m] [--batches 1 8] [--shares 0.1 1]
        [--suffix 16] [--tokens 48] [--waves 2] [--turns 3]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..instructions.prompts import prompts
from ..llm import guided_llm, peak_blocks
from ..report import Report, parser
from ..turns import take_turns
from .bench import LARGER, model_of

SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
COUNTS = ("guided_tokens", "gate_closed_tokens", "gate_probes", "gate_saved_tokens")
SCALE = 1.5


class Gated:
    """One engine, and the same texts with other gates."""

    def __init__(self, args: Any, model: Path) -> None:
        self.args = args
        self.model = model
        self.llm = guided_llm(
            model,
            max_model_len=512,
            max_num_seqs=max(args.batches),
            max_num_batched_tokens=4096,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        most = args.waves * max(args.batches)
        self.prompts = [prompt.conditional() for prompt in prompts(most)]

    def texts(self, batch: int, fields: dict[str, Any] | None) -> list[Any]:
        """The texts of `waves` times `batch` prompts, made `batch` at a time."""
        from vllm import SamplingParams

        texts = self.args.waves * batch
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
        outputs: list[Any] = self.llm.chat(self.prompts[:texts], params, use_tqdm=False)
        return outputs

    def seconds(self, batch: int, fields: dict[str, Any] | None, saves: bool = True) -> float:
        """What it takes to make these texts. saves: whether gates are probed."""
        self.scheduler._probes.saves = saves
        start = time.perf_counter()
        self.texts(batch, fields)
        return time.perf_counter() - start

    def counts(self, batch: int, fields: dict[str, Any] | None) -> dict[str, int]:
        """What is counted while these texts are made, and the most KV blocks of a step."""
        before = self.scheduler.guidance_stats()
        with peak_blocks(self.scheduler) as peak:
            self.seconds(batch, fields)
        after = self.scheduler.guidance_stats()
        counts = {name: after[name] - before[name] for name in COUNTS}
        return {**counts, "blocks": peak()}

    def thresholds(self, batch: int) -> list[float]:
        """Entropies, in nats, that these shares of the tokens of plain texts are at or above."""
        found = entropies(self.model, self.texts(batch, None))
        shares = torch.tensor(self.args.shares)
        return torch.quantile(found, 1 - shares).tolist()


def entropies(model: Path, outputs: Sequence[Any]) -> torch.Tensor:
    """The entropy of the model at each token of these texts, in nats: transformers' own."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for output in outputs:
        prompt, text = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            rows = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        log_probs = rows.log_softmax(-1)
        found.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(found)


def measure(gated: Gated, batch: int, turns: int) -> list[dict[str, Any]]:
    """A row for each share, from interleaved turns."""
    suffix = list(range(100, 100 + gated.args.suffix))
    fields = {
        entropy: {
            "guidance_scale": SCALE,
            "negative_suffix_token_ids": suffix,
            "guidance_min_entropy": entropy,
        }
        for entropy in gated.thresholds(batch)
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
    options.add_argument("--model", choices=["chat", LARGER], default="chat")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="guided")
    options.add_argument("--suffix", type=int, default=16, help="tokens of the suffix")
    options.add_argument("--tokens", type=int, default=48, help="tokens of each text")
    options.add_argument("--waves", type=int, default=2, help="texts for each of the B")
    options.add_argument("--turns", type=int, default=5)
    args = options.parse_args()
    report, rows = Report("gates", args), []
    report.head("B", "nats", "guided", "with probes", "without", "probes", "in vain", "blocks")
    with tempfile.TemporaryDirectory() as folder:
        gated = Gated(args, model_of(args.model, Path(folder)))
        for batch in args.batches:
            for row in measure(gated, batch, args.turns):
                rows.append(row)
                report.row(
                    batch,
                    f"{row['min_entropy']:.2f}",
                    f"{row['guided']:.0%}",
                    *(f"{row[name]:.2f}" for name in ("saving", "joint", "probes")),
                    f"{row['in_vain']:.0%}",
                    f"{row['blocks']:.2f}",
                )
    report.end(rows=rows)


if __name__ == "__main__":
    main()
