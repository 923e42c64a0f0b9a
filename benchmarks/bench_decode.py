"""Decoding: what a step of guided groups costs, against the plain streams that they are made of.

    python benchmarks/bench_decode.py [--batches 1 4 16 32] [--turns 8] [--sampled] [--peer]

The physics. A decode step reads all weights once, whatever the batch, and computes about
2 x parameters FLOPs for each stream. `bound` is the larger of the two times for 2B streams, from
rates that are measured here (physics.py). A group of two streams does the forward pass of two plain
requests, so a step of B groups should take as long as one of 2B plain requests:

    parity = step(2B plain) / step(B groups) = 1

It may be more than 1: a group needs one row of the head, one sample and one text, where two plain
requests need two of each. It is less than 1 if the blend and its bookkeeping cost more than that.

What is timed is `LLMEngine.step`, scheduler, model, sampling and text included, in one process and
on one thread. A load is a batch of texts of `--tokens` tokens; its time is the median of its steps,
without prompts. The loads take turns in one engine, in changing order, and ratios are taken within
a turn, because the machine's speed changes. Prompts and negatives are random tokens; each has
`--prompt` and `--negative` of them.

`--sampled` uses temperature 0.8 and top-p 0.95, else all is greedy. `--peer` adds guided `generate`
of Hugging Face transformers on the same batch and thread: the difference of two texts of different
length, so that prompts do not count.

Prints a card, a table of medians with ranges, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
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
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from card import card, vllm_version  # noqa: E402
from physics import Rates, measure  # noqa: E402
from safetensors import safe_open  # noqa: E402

MODELS = {
    "chat": ROOT / "models" / "SmolLM2-135M-Instruct",
    "stories": ROOT / "models" / "stories",
}
SCALE = 1.5
FIRST_ID = 100
"""Token ids below are special."""
SKIPPED = 2
"""Steps at both ends of a text that are not timed: prompts at its beginning, and its end."""
PEER_TOKENS = (4, 20)
"""Lengths of the two texts whose difference is timed."""


class Bench:
    """One engine, and loads of random prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        from cfg_core.vllm_plugin import guided_engine_args

        self._args = args
        self._random = random.Random(0)
        longest = args.prompt + args.negative + args.tokens
        self._engine = LLM(
            str(MODELS[args.model]),
            dtype=args.dtype,
            max_model_len=max(256, longest),
            max_num_seqs=2 * max(args.batches),
            max_num_batched_tokens=4096,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 30,
            **guided_engine_args(),
        ).llm_engine
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._requests = 0
        self._peer: Any = None

    def sizes(self) -> dict[str, int]:
        """Parameters of the model, and their bytes. A head that shares its weights counts once."""
        weights = 0
        for path in MODELS[self._args.model].glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                weights += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        width = torch.empty(0, dtype=getattr(torch, self._args.dtype)).element_size()
        return {"parameters": weights, "bytes": weights * width}

    def step_s(self, requests: int, guided: bool) -> tuple[float, float]:
        """Seconds, and CPU-seconds, of the median decode step of that many requests."""
        for _ in range(requests):
            self._add(guided)
        wall, cpu = [], []
        while self._engine.has_unfinished_requests():
            start, cpu_start = time.perf_counter(), time.process_time()
            self._engine.step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        timed = slice(SKIPPED, -SKIPPED)
        return statistics.median(wall[timed]), statistics.median(cpu[timed])

    def _add(self, guided: bool) -> None:
        from vllm import SamplingParams

        args, extra = self._args, None
        if guided:
            negative = self._ids(args.negative)
            extra = {"guidance_scale": SCALE, "negative_prompt_token_ids": negative}
        sampling: dict[str, Any] = {"temperature": 0.0}
        if args.sampled:
            sampling = {"temperature": 0.8, "top_p": 0.95}
        params = SamplingParams(
            max_tokens=args.tokens, ignore_eos=True, extra_args=extra, **sampling
        )
        self._requests += 1
        prompt: Any = {"prompt_token_ids": self._ids(args.prompt)}
        self._engine.add_request(str(self._requests), prompt, params)

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, self._vocabulary) for _ in range(length)]

    def peer_step_s(self, requests: int) -> float:
        """Seconds of a step of transformers' guided `generate` on a batch of that many prompts."""
        from transformers import AutoModelForCausalLM

        if self._peer is None:
            dtype = getattr(torch, self._args.dtype)
            path = str(MODELS[self._args.model])
            self._peer = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        prompts = torch.tensor([self._ids(self._args.prompt) for _ in range(requests)])
        negatives = torch.tensor([self._ids(self._args.negative) for _ in range(requests)])
        options: dict[str, Any] = {"do_sample": False}
        if self._args.sampled:
            options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
        took = []
        for tokens in PEER_TOKENS:
            start = time.perf_counter()
            self._peer.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                negative_prompt_ids=negatives,
                negative_prompt_attention_mask=torch.ones_like(negatives),
                guidance_scale=SCALE,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                **options,
            )
            took.append(time.perf_counter() - start)
        return (took[1] - took[0]) / (PEER_TOKENS[1] - PEER_TOKENS[0])

    def row(self, batch: int) -> dict[str, Any]:
        """Medians of all turns for `batch` groups, in ms and as ratios."""
        loads = {
            "plain(B)": (batch, False),
            "guided(B)": (batch, True),
            "plain(2B)": (2 * batch, False),
        }
        turns: list[dict[str, tuple[float, float]]] = []
        for turn in range(self._args.turns + 1):
            names = list(loads) if turn % 2 else list(reversed(loads))
            took = {name: self.step_s(*loads[name]) for name in names}
            if self._args.peer:
                took["peer(B)"] = (self.peer_step_s(batch), 0.0)
            turns.append(took)
        del turns[0]  # warms up

        def ratios(of: str, to: str, clock: int = 0) -> list[float]:
            return [turn[of][clock] / turn[to][clock] for turn in turns]

        parities = ratios("plain(2B)", "guided(B)")
        found = {
            "batch": batch,
            "ms": {name: 1000 * statistics.median(t[name][0] for t in turns) for name in turns[0]},
            "parity": statistics.median(parities),
            "parity_range": [min(parities), max(parities)],
            "parity_cpu": statistics.median(ratios("plain(2B)", "guided(B)", 1)),
            "of_plain": statistics.median(ratios("plain(B)", "guided(B)")),
        }
        if self._args.peer:
            found["of_peer"] = statistics.median(ratios("peer(B)", "guided(B)"))
        return found


def table_row(row: dict[str, Any], bound_s: float) -> str:
    ms, (low, high) = row["ms"], row["parity_range"]
    cells = [
        str(row["batch"]),
        *(f"{ms[name]:.1f}" for name in ("plain(B)", "guided(B)", "plain(2B)")),
        f"{1000 * bound_s:.1f}",
        f"{row['parity']:.3f} ({low:.2f} to {high:.2f})",
        f"{row['parity_cpu']:.3f}",
        f"{row['of_plain']:.2f}",
        f"{ms['peer(B)']:.0f}, {row['of_peer']:.1f}" if "of_peer" in row else "-",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| B | plain(B), ms | guided(B), ms | plain(2B), ms | bound, ms | parity (range) | of CPU time \
| tokens/s, of plain(B) | transformers(B): ms, times slower |
|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="chat")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--negative", type=int, default=48, help="tokens of each negative")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-p 0.95")
    parser.add_argument("--peer", action="store_true", help="also Hugging Face transformers")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    rates: Rates = measure(getattr(torch, args.dtype))
    bench = Bench(args)
    sizes = bench.sizes()
    described = {
        **card(),
        "vllm": vllm_version(),
        "threads": torch.get_num_threads(),
        **sizes,
        "read_gb_s": round(rates.bytes_s / 1e9, 1),
        "gemm_gflop_s": round(rates.flop_s / 1e9),
    }
    print(json.dumps(described))
    print(HEADER)
    rows = []
    for batch in args.batches:
        row = bench.row(batch)
        bound_s = rates.step_s(sizes["bytes"], sizes["parameters"], 2 * batch)
        rows.append({**row, "bound_ms": 1000 * bound_s})
        print(table_row(row, bound_s), flush=True)
    options = {key: value for key, value in vars(args).items() if key != "out"}
    result = json.dumps({"benchmark": "decode", "card": described, **options, "rows": rows})
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
