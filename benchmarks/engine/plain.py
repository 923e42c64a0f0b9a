"""What the plugin costs requests that are not guided, and what guidance adds to the first token.

    python benchmarks/bench_plain.py [--batches 1 8 32] [--turns 10]

The physics. Plain requests need nothing of the plugin. What they could pay for is its scheduler and
its worker, in each step:

    stock vLLM's step / the guided engine's step, both with plain requests = 1

A guided first token needs the prefill of prompt and negative. With nothing cached it takes as long
as a plain prompt of both lengths. What is in the prefix cache is not computed again, except for the
end of each stream, from its last whole block on. Here the question at the end of the prompt is new,
and the negative has one token beyond its last whole block. So a guided first token should take
little longer than a plain one. (A negative that ends with a whole block computes that block again.)

Two engines, stock and guided, run in processes of their own, take turns, and are stopped (SIGSTOP)
while it is not their turn. A step is the median of the decode steps of a load; a first token is the
time from `add_request` to it. Ratios are taken within a turn. All is greedy, on one thread, with
the chat model. Prints a card, two tables, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
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

from card import card, vllm_version  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
ENGINES = ("stock", "guided")
TOKENS, SKIPPED = 24, 2
BLOCK = 32
"""Tokens of a KV block."""
PROMPT, NEGATIVE, QUESTION = 256, 257, 32
"""Tokens of the streams whose first token is timed. The last QUESTION of the prompt are new."""


class Child:
    """The engine of this process, driven by lines of JSON."""

    def __init__(self, kind: str) -> None:
        from vllm import LLM

        from cfg_core.vllm_plugin import guided_engine_args

        plugin = guided_engine_args() if kind == "guided" else {}
        self._engine = LLM(
            str(MODEL),
            dtype="auto",
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 29,
            block_size=BLOCK,
            **plugin,
        ).llm_engine
        self._random = random.Random(0)
        self._names = 0
        self._shared = self._ids(PROMPT - QUESTION), self._ids(NEGATIVE)

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(length)]

    def _add(self, prompt: list[int], max_tokens: int, negative: list[int] | None = None) -> None:
        from vllm import SamplingParams

        extra = {"guidance_scale": 1.5, "negative_prompt_token_ids": negative} if negative else None
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        )
        self._names += 1
        given: Any = {"prompt_token_ids": prompt}
        self._engine.add_request(str(self._names), given, params)

    def step_ms(self, requests: int) -> float:
        """The median decode step of that many plain requests."""
        for _ in range(requests):
            self._add(self._ids(48), TOKENS)
        took = []
        while self._engine.has_unfinished_requests():
            start = time.perf_counter()
            self._engine.step()
            took.append(time.perf_counter() - start)
        return 1000 * statistics.median(took[SKIPPED:-SKIPPED])

    def first_token_ms(self, guided: bool, cached: bool) -> float:
        """The time to the first token of one request."""
        prompt, negative = self._shared if cached else (self._ids(PROMPT - QUESTION), None)
        self._engine.step()  # what the last request left to do
        start = time.perf_counter()
        self._add(
            prompt + self._ids(QUESTION),
            1,
            (negative or self._ids(NEGATIVE)) if guided else None,
        )
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return 1000 * (time.perf_counter() - start)

    def run(self) -> None:
        for line in sys.stdin:
            method, *given = json.loads(line)
            print(f"> {json.dumps(getattr(self, method)(*given))}", flush=True)


class Engine:
    """A child, as its parent sees it."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("step_ms", 1)
        self.pause()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, method: str, *given: Any) -> float:
        """The answer to a call of this method."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, *given]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("> "):
                return float(json.loads(line[2:]))
        raise SystemExit("The engine ended.")


def steps(engines: dict[str, Engine], batch: int, turns: int) -> dict[str, Any]:
    """Medians in ms, and the ratio stock / guided."""
    took: dict[str, list[float]] = {kind: [] for kind in engines}
    for turn in range(turns + 1):
        for kind in ENGINES if turn % 2 else reversed(ENGINES):
            value = engines[kind].ask("step_ms", batch)
            engines[kind].pause()
            if turn:  # the first one warms up
                took[kind].append(value)
    ratios = [a / b for a, b in zip(took["stock"], took["guided"], strict=True)]
    return {
        "batch": batch,
        **{kind: statistics.median(values) for kind, values in took.items()},
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
    }


def first_tokens(engine: Engine, cached: bool, turns: int) -> dict[str, Any]:
    """Medians in ms on the guided engine, and the ratio guided / plain."""
    plain, guided = [], []
    for turn in range(2 * turns + 2):
        pair = [engine.ask("first_token_ms", with_guidance, cached) for with_guidance in (0, 1)]
        if turn > 1:
            plain.append(pair[0])
            guided.append(pair[1])
    engine.pause()
    ratios = [b / a for a, b in zip(plain, guided, strict=True)]
    return {
        "cached": cached,
        "plain": statistics.median(plain),
        "guided": statistics.median(guided),
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        Child(args.child).run()
        return
    described = {**card(), "vllm": vllm_version()}
    print(json.dumps(described))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {kind: stack.enter_context(Engine(kind)) for kind in ENGINES}
        print("| plain requests | stock, ms | guided engine, ms | stock / guided (range) |")
        print("|---|---|---|---|")
        for batch in args.batches:
            rows.append(row := steps(engines, batch, args.turns))
            low, high = row["range"]
            print(
                f"| {batch} | {row['stock']:.1f} | {row['guided']:.1f} | {row['ratio']:.3f}"
                f" ({low:.2f} to {high:.2f}) |",
                flush=True,
            )
        print("\n| first token | plain, ms | guided, ms | guided / plain (range) |")
        print("|---|---|---|---|")
        for cached in (False, True):
            rows.append(row := first_tokens(engines["guided"], cached, args.turns))
            low, high = row["range"]
            print(
                f"| {'cached' if cached else 'cold'} | {row['plain']:.1f} | {row['guided']:.1f} |"
                f" {row['ratio']:.2f} ({low:.2f} to {high:.2f}) |",
                flush=True,
            )
    options = {key: value for key, value in vars(args).items() if key != "child"}
    print(json.dumps({"benchmark": "plain", "card": described, **options, "rows": rows}))


if __name__ == "__main__":
    main()
