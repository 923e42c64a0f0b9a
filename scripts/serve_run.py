"""`serve run CONFIG` on a small Ray of its own, which ends with it. scripts/serve.py starts it as a
child.

`serve run` takes the Ray that is initialised already; by itself it would join or start one with the
defaults.
"""

import os
import sys
from pathlib import Path

import ray
from ray.serve.scripts import cli

OBJECT_STORE_BYTES = 256 * 2**20  # requests and answers pass through it, no tensors

if __name__ == "__main__":
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=max(2, os.cpu_count() or 1),  # a router and a replica fit on any machine
        object_store_memory=OBJECT_STORE_BYTES,
    )
    cli(["run", "--app-dir", str(Path(__file__).resolve().parent.parent), sys.argv[1]])
