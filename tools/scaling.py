"""Scale and update a served cluster under load, and print a table of the requests' outcomes.

    python -m tools.scaling [--json FILE]

The cluster consists of real processes on this machine. `autoscaling.GuidedLoad` scales between one
replica and three, for few clients, many, and few again. With three replicas there is also a rolling
update: `serve deploy` of a configuration whose engine has another `max_num_seqs`. Clients know the
right answers (load.py).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.chaos.judging import Row, judge
from tools.chaos.stage import ENGINE, REPLICA, chaos_config
from tools.serving.cluster import Cluster
from tools.serving.load import Load
from tools.serving.process import REPOSITORY, ServeProcess, free_port

FEW, MANY = 2, 12
STREAMS_PER_REPLICA = 6
STEP_LIMIT_S = 600
HOLD_S = 10.0
"""How long clients continue after each step."""


def scaling_config() -> dict[str, Any]:
    """Return configs/stories.yaml with a generator that scales by streams, within seconds."""
    config = chaos_config()
    router, replica = config["applications"][0]["deployments"]
    del config["applications"][0]["args"][
        "silence_timeout_s"
    ]  # no process dies here, but engines that start use up the CPUs
    router["num_replicas"] = 1
    router["graceful_shutdown_timeout_s"] = 120
    del replica["num_replicas"]
    replica["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 3,
        "upscale_delay_s": 2,
        "downscale_delay_s": 30,
        "metrics_interval_s": 1,
        "look_back_period_s": 3,
        "policy": {
            "policy_function": "deployments.autoscaling:GuidedLoad",
            "policy_kwargs": {"target_streams": STREAMS_PER_REPLICA},
        },
    }
    replica["graceful_shutdown_timeout_s"] = 120
    return config


@dataclass
class Service:
    """The object of the measurement: a cluster that serves `config`, and its clients."""

    cluster: Cluster
    server: ServeProcess
    load: Load
    config: dict[str, Any]
    dashboard: str

    def replicas(self) -> set[int]:
        """Return the process ids of the replicas, including those that are starting."""
        return {process.pid for process in self.cluster.find(REPLICA)}

    def engines(self) -> int:
        return len(self.cluster.find(ENGINE))

    def whole(self, replicas: int) -> bool:
        """Return whether exactly `replicas` replicas exist, and all of them serve."""
        return len(self.replicas()) == self.engines() == replicas == self.server.replicas()

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy `config` with `serve deploy`, as an operator would."""
        path = self.cluster.folder / "next.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [
            sys.executable,
            "-m",
            "ray.serve.scripts",
            "deploy",
            "-a",
            self.dashboard,
            str(path),
        ]
        subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self.cluster.env,
            check=True,
            capture_output=True,
            timeout=60,
        )

    async def step(
        self, name: str, clients: int, change: Callable[[], None], done: Callable[[], bool]
    ) -> Row:
        """Run `clients`, apply `change`, and go on until `done` and for HOLD_S longer.

        The row counts all requests of the step.
        """
        self.load.clients = clients
        self.load.outcomes.clear()
        stop = asyncio.Event()
        asking = asyncio.ensure_future(self.load.run(stop, seed=clients))
        at = time.monotonic()
        await asyncio.to_thread(change)
        taken = None
        while taken is None and time.monotonic() - at < STEP_LIMIT_S:
            await asyncio.sleep(0.5)
            if await asyncio.to_thread(done):
                taken = time.monotonic() - at
        await asyncio.sleep(HOLD_S)
        stop.set()
        await asking
        return judge(name, self.load.outcomes, at, taken, Counter())


HEADER = (
    "| step | clients | asked | right | lost without an error | wrong | errors told | longest"
    " request, s | done after, s |\n" + "|---" * 9 + "|"
)


def line(row: Row, clients: int) -> str:
    told = ", ".join(f"{count} {kind}" for kind, count in row.told.items()) or "-"
    done = "not reached" if row.whole_s is None else f"{row.whole_s:.0f}"
    return (
        f"| {row.fault} | {clients} | {row.asked} | {row.right} | {row.lost} | {row.wrong} | {told}"
        f" | {row.slowest_s:.0f} | {done} |"
    )


async def steps(service: Service) -> list[Row]:
    """Run all steps: one replica, then three, then three new ones, then one."""
    updated = copy.deepcopy(service.config)
    updated["applications"][0]["args"]["engine"]["max_num_seqs"] = 48
    before: set[int] = set()

    def update() -> None:
        before.update(service.replicas())
        service.deploy(updated)

    def nothing() -> None:
        """Change nothing: only the number of clients changes."""

    rows = []
    for name, clients, change, done in (
        ("few clients: one replica", FEW, nothing, lambda: service.whole(1)),
        ("many: one to three", MANY, nothing, lambda: service.whole(3)),
        (
            "rolling update of three",
            MANY,
            update,
            lambda: service.whole(3) and not before & service.replicas(),
        ),
        ("few again: three to one", FEW, nothing, lambda: service.whole(1)),
    ):
        rows.append(row := await service.step(name, clients, change, done))
        print(line(row, clients), flush=True)
        for outcome in service.load.outcomes:
            if outcome.kind != "right":
                print(f"  {outcome.kind}: {outcome.detail}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    port, agent = free_port(), free_port()
    options = [
        "--include-dashboard=true",
        f"--dashboard-port={port}",
        f"--dashboard-agent-listen-port={agent}",
    ]
    with Cluster(head_options=options) as cluster:
        cluster.add(engine=2)
        cluster.add(engine=2)
        config = scaling_config()
        with cluster.serve(config) as server:
            load = Load(server.url, FEW)
            asyncio.run(load.learn())
            print(HEADER, flush=True)
            rows = asyncio.run(
                steps(Service(cluster, server, load, config, f"http://127.0.0.1:{port}"))
            )
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
