"""What groups cost the scheduler: microseconds per engine step, against stock vLLM, in one
interleaved run.

For each number of groups G, every stream is in decode, so a step has 2G rows for all: 2G plain
requests on the stock scheduler, the same on the guided one, and G groups. Timed are `schedule` and
`update_from_output` of the real schedulers over the real KV cache manager; there is no model. The
schedulers take turns; the median of the ratios of one turn counts.

    python benchmarks/bench_scheduler.py [--groups 1 8 32 128 256] [--turns 30] [--steps 10]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from card import card  # noqa: E402

from tests.simulation.sim import (  # noqa: E402
    EnginePath,
    Simulation,
    make_config,
)

BLOCKS, PROMPT = 16_384, 64


class Subject:
    """A scheduler with its load, all in decode."""

    def __init__(
        self, folder: Path, way: EnginePath, streams: int, *, guided: bool, groups: bool
    ) -> None:
        options: dict[str, Any] = {
            "max_model_len": 512,
            "max_num_seqs": streams,
            "max_num_batched_tokens": PROMPT * max(512, streams),  # all prompts in one step
        }
        config = make_config(folder, **options)
        if not guided:
            config.scheduler_config.scheduler_cls = None
        simulation = Simulation(config, BLOCKS * max(1, streams // 512), way)
        self.scheduler, self.rows = simulation.scheduler, streams
        for i in range(streams // 2 if groups else streams):
            prompt = [4 + (i + k) % 250 for k in range(PROMPT)]
            guidance: dict[str, Any] = {"scale": 2.0, "negative": prompt[::-1]} if groups else {}
            simulation.add(f"r{i}", prompt, 400, **guidance)
        for _ in range(3):
            self.step()

    def step(self) -> float:
        """Seconds that the scheduler took for one step."""
        from vllm.v1.outputs import ModelRunnerOutput

        start = time.perf_counter()
        step = self.scheduler.schedule()
        took = time.perf_counter() - start
        ids = list(step.num_scheduled_tokens)
        assert len(ids) == self.rows
        requests = self.scheduler.requests
        sampled = [[] if requests[r].is_prefill_chunk else [7] for r in ids]
        output = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)
        start = time.perf_counter()
        self.scheduler.update_from_output(step, output)
        return took + time.perf_counter() - start


def measure(subjects: dict[str, Subject], turns: int, steps: int) -> dict[str, list[float]]:
    """Microseconds per step of each turn."""
    out: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(turns):
        for name, subject in subjects.items():
            out[name].append(1e6 * sum(subject.step() for _ in range(steps)) / steps)
    return out


def compare(
    folder: Path, way: EnginePath, groups: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of the table for so many groups."""
    streams = 2 * groups
    subjects = {
        "stock, plain": Subject(folder, way, streams, guided=False, groups=False),
        "guided, plain": Subject(folder, way, streams, guided=True, groups=False),
        "guided, groups": Subject(folder, way, streams, guided=True, groups=True),
    }
    gc.collect()
    gc.disable()
    times = measure(subjects, args.turns, args.steps)
    gc.enable()
    stock = times["stock, plain"]
    return [
        {
            "streams": streams,
            "scheduling": "async" if way.asynchronous else "sync",
            "load": subject,
            "us_per_step_median": round(statistics.median(took)),
            "us_per_step_min": round(min(took)),
            "x_stock": round(statistics.median(a / b for a, b in zip(took, stock, strict=True)), 3),
        }
        for subject, took in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    assert args.turns * args.steps < 390, "the requests would end"
    ways = (EnginePath(), EnginePath(asynchronous=True))
    with tempfile.TemporaryDirectory() as name:
        rows = [
            row
            for groups, way in product(args.groups, ways)
            for row in compare(Path(name), way, groups, args)
        ]
    for key, value in card().items():
        print(f"{key}: {value}")
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    result = json.dumps({"benchmark": "scheduler", "card": card(), "rows": rows})
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
