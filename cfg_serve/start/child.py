"""Run `serve run CONFIG` on a small Ray cluster of its own, which ends with this process.

    python -m cfg_serve.start.child CONFIG STATUS

cfg_serve.start.server starts it. STATUS is a file: what Ray refuses in the configuration, and then,
twice a second, what Serve says of its deployments. `serve run` uses the Ray cluster that is
initialised already. Without one, it would join a cluster or start one with default settings.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import DeploymentStatusOverview
from ray.serve.scripts import cli

from cfg_serve.check.ray_values import problems_of
from cfg_serve.start.preflight import ray_cpus

OBJECT_STORE_BYTES = 256 * 2**20  # it holds requests and answers, no tensors
LOOK_S = 0.5


def watch(file: Path) -> None:
    """Write what Serve says into `file`, until this process ends.

    If it cannot go on, it ends this process, because nobody would ever hear that all is ready.
    """
    try:
        while True:
            with contextlib.suppress(RayError, RayServeException):  # Serve has not started, or ends
                write(file, {"applications": applications()})
            time.sleep(LOOK_S)
    finally:
        _thread.interrupt_main()


def applications() -> dict[str, Any]:
    return {
        name: {
            "status": told.status.value,
            "message": told.message,
            "deployments": {
                part: {
                    "status": state.status.value,
                    "running": running(state),
                    "message": state.message,
                }
                for part, state in told.deployments.items()
            },
        }
        for name, told in serve.status().applications.items()
    }


def running(state: DeploymentStatusOverview) -> int:
    """The replicas that answer."""
    return sum(n for kind, n in state.replica_states.items() if kind == "RUNNING")


def write(file: Path, said: dict[str, Any]) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(said))
    new.replace(file)


def main(config: Path, status: Path) -> None:
    if refused := problems_of(yaml.safe_load(config.read_text(encoding="utf-8"))):
        write(status, {"refused": [problem.said for problem in refused]})
        return
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=ray_cpus(),
        object_store_memory=OBJECT_STORE_BYTES,
    )
    threading.Thread(target=watch, args=(status,), daemon=True).start()
    cli(["run", "--app-dir", os.getcwd(), str(config)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
