"""The short set of benchmarks: `make bench`. About twelve minutes on two cores.

Each command below runs by itself, one after the other, and its table is printed. The files named
bench_*.py say what they measure, and run longer by themselves. Stop other work on the machine
first: the ratios bear noise, the absolute times do not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
COMMANDS = (
    "bench_scheduler.py --turns 10 --groups 1 128",
    "bench_decode.py --batches 1 8 --turns 3",
    "bench_decode.py --batches 8 --turns 3 --sampling top-p",
    "bench_plain.py --batches 8 --turns 3",
    "bench_capacity.py --groups 300 --prompts 1024 --negatives 1",
    "bench_routing.py --requests 1000",
    "bench_scale.py --replicas 4 64 --measured",
    "bench_http.py --modes proxy haproxy --clients 1 8 --requests 60 --turns 2 --whole",
)
LIMIT_S = 600


def main() -> int:
    failed = []
    bar = tqdm(COMMANDS, unit="benchmark", disable=None)
    for command in bar:
        bar.set_description(command.split()[0])
        script, *options = command.split()
        done = subprocess.run(
            [sys.executable, str(HERE / script), *options],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        tqdm.write(f"== benchmarks/{command}")
        tqdm.write("\n".join(line for line in done.stdout.splitlines() if line.startswith("|")))
        if done.returncode:
            failed.append(command)
            tqdm.write(done.stderr[-2000:])
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
