"""A long simulation, or the replay of one seed. See sim.py."""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from tests.simulation.loads import simulate
from tests.simulation.paths import PATHS

COUNTED = (
    "joint_steps",
    "solo_rows",
    "recomputed_streams",
    "group_preemptions",
    "groups_admitted",
    "windows_opened",
    "windows_closed",
    "scored_tokens",
    "gate_probes",
    "gate_saved_tokens",
)


def one(folder: Path, path_name: str, seed: int) -> tuple[collections.Counter, str]:
    path = next(p for p in PATHS if p.name == path_name)
    counts: collections.Counter = collections.Counter()
    try:
        sim = simulate(folder, path, seed)
    except Exception as error:  # any exception is a finding
        return counts, f"--seed {seed} --path {path_name}: {type(error).__name__}: {error}"
    stats = sim.scheduler.guidance_stats()
    counts.update({name: stats[name] for name in COUNTED}, engine_steps=sim.steps, runs=1)
    return counts, ""


def long_run(folder: Path, joint_steps: int, processes: int, part: str) -> None:
    started, seed = time.monotonic(), 0
    names = [p.name for p in PATHS if part in p.name]
    by_path: dict[str, collections.Counter] = {name: collections.Counter() for name in names}
    failures: list[str] = []
    with ProcessPoolExecutor(processes) as pool:
        while sum(c["joint_steps"] for c in by_path.values()) < joint_steps:
            tasks = {
                pool.submit(one, folder, name, s): name
                for s in range(seed, seed + 20)
                for name in by_path
            }
            seed += 20
            for task in as_completed(tasks):
                counts, failure = task.result()
                by_path[tasks[task]] += counts
                failures += [failure] * bool(failure)
    seconds = time.monotonic() - started
    columns = ("runs", "engine_steps", *COUNTED)
    print("| path |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    total: collections.Counter = sum(by_path.values(), collections.Counter())
    for name, counts in [*by_path.items(), ("all", total)]:
        print("|", name, "|", " | ".join(str(counts[c]) for c in columns), "|")
    print(
        f"{seconds:.0f} s with {processes} processes: {total['joint_steps'] / seconds:.0f} joint"
        " steps/s"
    )
    print(f"failures: {len(failures)}", *failures[:20], sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--joint-steps", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--paths", default="", help="only paths with this in their names")
    parser.add_argument("--path", choices=[p.name for p in PATHS], default=PATHS[0].name)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.seed is None:
            long_run(folder, args.joint_steps, args.processes, args.paths)
        else:
            done = simulate(folder, next(p for p in PATHS if p.name == args.path), args.seed)
            print(done.scheduler.guidance_stats())
