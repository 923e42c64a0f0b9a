"""Decoding: what a guided group costs, against the two plain streams that it is made of.

    python benchmarks/bench_decode.py [--batches 1 4 16 32] [--turns 5] [--sampled] [--out FILE]

The physics. A decode step reads all weights once, whatever the batch, and computes about
2 x parameters FLOPs for each stream. A group of two streams does the forward pass of two plain
requests, so `guided(B)` should cost what `plain(2B)` costs, and give half as many tokens:

    parity = guided(B) / (plain(2B) / 2) = 1

It may be more than 1. A group needs one row of the head, one sample and one text, where two plain
requests need two of each. It is less than 1 if the blend costs more than that saves.

All requests are greedy, or sampled with `--sampled` (temperature 0.8, top-p 0.95). Prompts have 48
tokens, negatives `--negative`. The time is that of whole texts of `--tokens` tokens, prompts
included; prompts differ from turn to turn, so that no prefix is cached. The three loads take turns
in one engine, and ratios are taken within a turn, because the machine's speed changes.

Prints a card, a table of medians with ranges, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

from card import card  # noqa: E402

MODELS = {
    "chat": ROOT / "models" / "SmolLM2-135M-Instruct",
    "stories": ROOT / "models" / "stories",
}
PROMPT_TOKENS = 48
SCALE = 1.5
FIRST_ID = 100
"""Token ids below are special."""


class Bench:
    """One engine, and loads of random prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        from cfg_core.vllm_plugin import guided_engine_args

        self._args = args
        self._random = random.Random(0)
        self.llm = LLM(
            str(MODELS[args.model]),
            dtype=args.dtype,
            max_model_len=512,
            max_num_seqs=2 * max(args.batches),
            max_num_batched_tokens=4096,
            enforce_eager=True,
            kv_cache_memory_bytes=512 << 20,
            **guided_engine_args(),
        )
        self._vocabulary = self.llm.llm_engine.model_config.get_vocab_size()

    def rate(self, requests: int, guided: bool) -> float:
        """Output tokens per second of that many requests at once."""
        from vllm import SamplingParams

        sampling: dict[str, Any] = {"temperature": 0.0}
        if self._args.sampled:
            sampling = {"temperature": 0.8, "top_p": 0.95}
        prompts, params = [], []
        for _ in range(requests):
            extra = None
            if guided:
                negative = self._ids(self._args.negative)
                extra = {"guidance_scale": SCALE, "negative_prompt_token_ids": negative}
            prompts.append({"prompt_token_ids": self._ids(PROMPT_TOKENS)})
            params.append(
                SamplingParams(
                    max_tokens=self._args.tokens, ignore_eos=True, extra_args=extra, **sampling
                )
            )
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / took

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, self._vocabulary) for _ in range(length)]

    def measure(self, batch: int) -> dict[str, Any]:
        turns = []
        for _ in range(self._args.turns + 1):
            turns.append(
                {
                    "plain(B)": self.rate(batch, guided=False),
                    "guided(B)": self.rate(batch, guided=True),
                    "plain(2B)": self.rate(2 * batch, guided=False),
                }
            )
        del turns[0]  # warms up
        parities = [turn["guided(B)"] / (turn["plain(2B)"] / 2) for turn in turns]
        shares = [turn["guided(B)"] / turn["plain(B)"] for turn in turns]
        return {
            "batch": batch,
            **{name: statistics.median(turn[name] for turn in turns) for name in turns[0]},
            "parity": statistics.median(parities),
            "parity_range": [min(parities), max(parities)],
            "of_plain": statistics.median(shares),
            "turns": turns,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="chat")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--negative", type=int, default=48, help="tokens of each negative")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-p 0.95")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    described = card()
    print(json.dumps(described))
    bench = Bench(args)
    print("| B | plain(B) | guided(B) | plain(2B) | guided : half of plain(2B) | : plain(B) |")
    print("|---|---|---|---|---|---|")
    rows = []
    for batch in args.batches:
        row = bench.measure(batch)
        rows.append(row)
        low, high = row["parity_range"]
        rates = " | ".join(f"{row[name]:.1f}" for name in ("plain(B)", "guided(B)", "plain(2B)"))
        parity = f"{row['parity']:.3f} ({low:.3f} to {high:.3f})"
        print(f"| {batch} | {rates} | {parity} | {row['of_plain']:.2f} |", flush=True)
    options = {key: value for key, value in vars(args).items() if key != "out"}
    result = json.dumps({"benchmark": "decode", "card": described, **options, "rows": rows})
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
