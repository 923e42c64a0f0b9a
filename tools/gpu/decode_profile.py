"""Where a decode step of B guided requests spends its time, beside one of 2B plain requests.

    python -m tools.gpu.decode_profile [--model 8b] [--batch 128]

On 8 billion weights, 128 guided requests were slower than 256 plain ones (0.92 of their tokens per
second), and no profile said why. Here the engine runs in this process, so that torch's profiler
sees the host and the GPU. It tells, for each load: the median step without the profiler; under it,
the GPU's busy time and the time between kernels in a step, the kernels that take most time, and
behind which kernels the longest gaps are. On a CPU it tells operators in place of kernels.

Prints tables, and a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.bench import CUDA, model_of
from benchmarks.engine.decode import SAMPLINGS, DecodeBench
from benchmarks.report import Report, parser

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

WARM_STEPS = 10
"""Steps with prompts, and what is made once."""
TIMED_STEPS = 20
PROFILED_STEPS = 8
ROWS = 25


@dataclass(frozen=True)
class Span:
    """One kernel on the GPU, or one operator on the CPU, in microseconds."""

    name: str
    start: float
    end: float


def busy_and_gaps(spans: Iterable[Span]) -> tuple[float, dict[str, float]]:
    """Time in which at least one span runs, and the time without one after each name."""
    busy, gaps, reached, last = 0.0, defaultdict[str, float](float), None, ""
    for span in sorted(spans, key=lambda span: span.start):
        if reached is not None and span.start > reached:
            gaps[last] += span.start - reached
        begin = span.start if reached is None else max(reached, span.start)
        busy += max(0.0, span.end - begin)
        if reached is None or span.end > reached:
            reached, last = span.end, span.name
    return busy, dict(gaps)


def spans_of(profiled: Any) -> list[Span]:
    """Kernels on the GPU; on a CPU the operators that no other operator called."""
    wanted = "CUDA" if CUDA else "CPU"
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type.name == wanted and (CUDA or event.cpu_parent is None)
    ]


class Profiled(DecodeBench):
    """A DecodeBench whose steps can be profiled while all requests decode."""

    def load(self, requests: int, negative: int) -> dict[str, Any]:
        """Figures of the steps of so many requests. negative: as in DecodeBench.step_s."""
        for _ in range(requests):
            self.send(self.ids(self.args.prompt), self.params(negative))
        for _ in range(WARM_STEPS):
            self.engine.step()
        took = []
        for _ in range(TIMED_STEPS):
            began = time.perf_counter()
            self.engine.step()
            took.append(time.perf_counter() - began)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * CUDA
        with profile(activities=activities) as profiled:
            began = time.perf_counter()
            for _ in range(PROFILED_STEPS):
                self.engine.step()
            under_us = 1e6 * (time.perf_counter() - began)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"step_us": round(1e6 * statistics.median(took)), **told(profiled, under_us)}


def told(profiled: Any, under_us: float) -> dict[str, Any]:
    """Figures of one step, in microseconds."""
    spans = spans_of(profiled)
    busy, gaps = busy_and_gaps(spans)
    totals, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for span in spans:
        totals[span.name] += span.end - span.start
        counts[span.name] += 1
    most = sorted(totals, key=lambda name: -totals[name])[:ROWS]

    def a_step(total: float) -> float:
        return round(total / PROFILED_STEPS, 1)

    return {
        "profiled_step_us": a_step(under_us),
        "busy_us": a_step(busy),
        "gaps_us": a_step(sum(gaps.values())),
        "launches": a_step(len(spans)),
        "by_name": [[name, a_step(totals[name]), a_step(counts[name])] for name in most],
        "gaps_after": [
            [name, a_step(gaps[name])] for name in sorted(gaps, key=lambda name: -gaps[name])[:ROWS]
        ],
    }


def printed(loads: dict[str, dict[str, Any]]) -> str:
    """Tables: the loads, and what each has more of than the other."""
    lines = ["| load | step, us | profiled | busy | gaps | launches |", "|---|---|---|---|---|---|"]
    keys = ("step_us", "profiled_step_us", "busy_us", "gaps_us", "launches")
    lines += [
        f"| {name} | {' | '.join(str(figures[key]) for key in keys)} |"
        for name, figures in loads.items()
    ]
    for name, figures in loads.items():
        lines += ["", f"| {name}: kernel | us a step | launches |", "|---|---|---|"]
        lines += [f"| {kernel[:90]} | {us} | {n} |" for kernel, us, n in figures["by_name"]]
        lines += ["", f"| {name}: gap after | us a step |", "|---|---|"]
        lines += [f"| {kernel[:90]} | {us} |" for kernel, us in figures["gaps_after"][:10]]
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="8b", help="as for benchmarks.engine.decode")
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options.add_argument("--batch", type=int, default=128, help="guided requests")
    options.add_argument("--prompt", type=int, default=48)
    args = options.parse_args()
    report = Report("decode profile", args)
    tokens = WARM_STEPS + TIMED_STEPS + PROFILED_STEPS + 8
    given = {**vars(args), "batches": [args.batch], "negatives": [args.prompt], "tokens": tokens}
    with tempfile.TemporaryDirectory() as folder:
        bench = Profiled(argparse.Namespace(**given), model_of(args.model, Path(folder)))
        sizes = {f"guided({args.batch})": (args.batch, args.prompt)}
        sizes[f"plain({2 * args.batch})"] = (2 * args.batch, 0)
        bench.load(*next(iter(sizes.values())))  # warms up
        loads = {name: bench.load(*size) for name, size in sizes.items()}
    print(printed(loads))
    guided, plain = loads.values()
    report.end(
        headline=f"step {guided['step_us']} us guided, {plain['step_us']} plain; busy"
        f" {guided['busy_us']:.0f} and {plain['busy_us']:.0f}, gaps {guided['gaps_us']:.0f} and"
        f" {plain['gaps_us']:.0f}",
        sampling=SAMPLINGS["greedy"],
        loads=loads,
    )


if __name__ == "__main__":
    main()
