"""The short set of benchmarks: `make bench`. About twelve minutes on two cores.

Each command below runs by itself, one after the other, and its table is printed. The modules say
what they measure, and run longer by themselves. Stop other work on the machine first: the ratios
bear noise, the absolute times do not.
"""

from __future__ import annotations

import subprocess
import sys

from tqdm import tqdm

from . import ROOT

COMMANDS = (
    "engine.scheduler --turns 10 --groups 1 128",
    "engine.decode --batches 1 8 --turns 3",
    "engine.decode --batches 8 --turns 3 --sampling top-p",
    "engine.plain --batches 8 --turns 3",
    "engine.capacity --groups 300 --prompts 1024 --negatives 1",
    "routing.simulation --requests 1000",
    "routing.scale --replicas 4 64 --measured",
    "serving.http --modes proxy haproxy --clients 1 8 --requests 60 --turns 2 --whole",
)
LIMIT_S = 600


def main() -> int:
    failed = []
    bar = tqdm(COMMANDS, unit="benchmark", disable=None)
    for command in bar:
        bar.set_description(command.split()[0])
        module, *options = command.split()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        tqdm.write(f"== benchmarks.{command}")
        tqdm.write("\n".join(line for line in done.stdout.splitlines() if line.startswith("|")))
        if done.returncode:
            failed.append(command)
            tqdm.write(done.stderr[-2000:])
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
