"""Run `serve run CONFIG` on a small Ray cluster of its own, which ends with this process.

scripts/serve.py starts this script as a child process. `serve run` uses the Ray cluster that is
initialised already. Without one, it would join a cluster or start one with default settings.
"""

import os
import sys
from pathlib import Path

import ray
from ray.serve.scripts import cli

OBJECT_STORE_BYTES = 256 * 2**20  # it holds requests and answers, no tensors

if __name__ == "__main__":
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=max(2, os.cpu_count() or 1),  # so that a router and a replica fit on any machine
        object_store_memory=OBJECT_STORE_BYTES,
    )
    cli(["run", "--app-dir", str(Path(__file__).resolve().parent.parent), sys.argv[1]])
