"""What the plugin costs requests that are not guided, and what guidance adds to the first token.

    python -m benchmarks.engine.plain [--batches 1 8 32] [--turns 10]

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
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..llm import CHAT, guidance, guided_llm, set_environment
from ..report import Report, parser
from ..turns import Turns, spread, take_turns

set_environment()

ENGINES = ("stock", "guided")
TOKENS, SKIPPED = 24, 2
BLOCK = 32
"""Tokens of a KV block."""
PROMPT, NEGATIVE, QUESTION = 256, 257, 32
"""Tokens of the streams whose first token is timed. The last QUESTION of the prompt are new."""


class Child:
    """The engine of this process, driven by lines of JSON."""

    def __init__(self, kind: str) -> None:
        self._engine = guided_llm(
            CHAT,
            dtype="auto",
            guided=kind == "guided",
            max_model_len=1024,
            max_num_batched_tokens=4096,
            block_size=BLOCK,
        ).llm_engine
        self._random = random.Random(0)
        self._names = 0
        self._shared = self._ids(PROMPT - QUESTION), self._ids(NEGATIVE)

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(length)]

    def _add(self, prompt: list[int], max_tokens: int, negative: list[int] | None = None) -> None:
        from vllm import SamplingParams

        extra = guidance(1.5, negative) if negative else None
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
            [sys.executable, "-m", "benchmarks.engine.plain", "--child", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("step_ms", 1)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, method: str, *given: Any) -> float:
        """The answer to a call of this method. The child waits stopped for the next one."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, *given]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("> "):
                self.pause()
                return float(json.loads(line[2:]))
        raise SystemExit("The engine ended.")


def row_of(turns: Turns, of: str, to: str) -> dict[str, Any]:
    """Medians in ms, and the ratio of the two ways with its range."""
    ratios = turns.ratios(of, to)
    span = [min(ratios), max(ratios)]
    return {**turns.medians(), "ratio": statistics.median(ratios), "range": span}


def steps(engines: dict[str, Engine], batch: int, turns: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        kind: partial(engine.ask, "step_ms", batch) for kind, engine in engines.items()
    }
    return {"batch": batch, **row_of(take_turns(ways, turns), "stock", "guided")}


def first_tokens(engine: Engine, cached: bool, turns: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        kind: partial(engine.ask, "first_token_ms", kind == "guided", cached)
        for kind in ("plain", "guided")
    }
    return {"cached": cached, **row_of(take_turns(ways, 2 * turns, 2), "guided", "plain")}


def measure(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {kind: stack.enter_context(Engine(kind)) for kind in ENGINES}
        report.head("plain requests", "stock, ms", "guided engine, ms", "stock / guided (range)")
        for batch in args.batches:
            rows.append(row := steps(engines, batch, args.turns))
            times = (f"{row[kind]:.1f}" for kind in ENGINES)
            report.row(batch, *times, f"{row['ratio']:.3f} ({spread(row['range'])})")
        report.head("first token", "plain, ms", "guided, ms", "guided / plain (range)")
        for name, cached in (("cold", False), ("cached", True)):
            rows.append(row := first_tokens(engines["guided"], cached, args.turns))
            times = (f"{row[kind]:.1f}" for kind in ("plain", "guided"))
            report.row(name, *times, f"{row['ratio']:.2f} ({spread(row['range'])})")
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--turns", type=int, default=10)
    options.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        Child(args.child).run()
        return
    del args.child
    report = Report("plain", args)
    report.end(rows=measure(args, report))


if __name__ == "__main__":
    main()
