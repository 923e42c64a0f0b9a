"""What groups cost the scheduler: microseconds per engine step, against stock vLLM, in one
interleaved run.

For each number of groups G, every stream is in decode, so a step has 2G rows for all: 2G plain
requests on the stock scheduler, the same on the guided one, and G groups. Timed are `schedule` and
`update_from_output` of the real schedulers over the real KV cache manager; there is no model. The
schedulers take turns; the median of the ratios of one turn counts.

    python -m benchmarks.engine.scheduler [--groups 1 8 32 128 256] [--turns 30] [--steps 10]
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from tests.simulation.paths import EnginePath, make_config
from tests.simulation.sim import Simulation

from ..report import Report, parser
from ..turns import Turns, take_turns

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


def measure(subjects: dict[str, Subject], turns: int, steps: int) -> Turns:
    """Microseconds per step."""
    ways = {
        name: lambda subject=subject: 1e6 * sum(subject.step() for _ in range(steps)) / steps
        for name, subject in subjects.items()
    }
    return take_turns(ways, turns, warm_up=0)


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
    took = measure(subjects, args.turns, args.steps)
    gc.enable()
    return [
        {
            "streams": streams,
            "scheduling": "async" if way.asynchronous else "sync",
            "load": subject,
            "us_per_step_median": round(took.median(subject)),
            "us_per_step_min": round(min(took.values(subject))),
            "x_stock": round(took.ratio(subject, "stock, plain"), 3),
        }
        for subject in subjects
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--groups", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    options.add_argument("--turns", type=int, default=30)
    options.add_argument("--steps", type=int, default=10)
    args = options.parse_args()
    assert args.turns * args.steps < 390, "the requests would end"
    report = Report("scheduler", args)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for groups, asynchronous in product(args.groups, (False, True)):
            found = compare(Path(name), EnginePath(asynchronous=asynchronous), groups, args)
            if not rows:
                report.head(*found[0])
            for row in found:
                report.row(*row.values())
            rows += found
    report.end(rows=rows)


if __name__ == "__main__":
    main()
