"""Inject faults into a served cluster, and print a table of the requests' outcomes.

    python -m tools.chaos                          all faults; `link` needs root and `ip`
    python -m tools.chaos --faults engine replica  some of them
    python -m tools.chaos --clients 12 --json FILE
    python -m tools.chaos --across-nodes --faults worker node
    python -m tools.chaos --haproxy --faults haproxy proxy router

The cluster consists of real processes on this machine: a head node (controller, proxy, two routers)
and worker nodes with one engine each. Two of these nodes are in use. With `--across-nodes`, each
engine has two workers, which are Ray actors on different nodes; their CPUs are presented to Ray as
GPUs. With `--haproxy`, HAProxy is in front, and connects to the routers without Serve's proxy.

Clients send guided and plain requests whose right answers are known, streamed and not. For each
fault the table has the requests in flight, their outcomes, the time until clients got the last
error, the longest pause of a stream, and the time until the service was restored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tools.serving.cluster import Cluster, Node
from tools.serving.load import Load, Outcome
from tools.serving.process import REPOSITORY, ServeProcess, haproxy_env, shipped_config

RAY_CPU = REPOSITORY / "tests" / "support" / "ray_cpu"

REPLICAS = ROUTERS = 2
RETRIED, MOVED = "retried_requests", "moved_streams"
RECOVERY_LIMIT_S = 300
CALM_S = 5.0
"""Service counts as restored when everything runs and no client got an error for this long."""

ENGINE, REPLICA, ROUTER = (
    "EngineCore",
    "ServeReplica:cfg:ModelReplica",
    "ServeReplica:cfg:CfgRouter",
)
WORKER = "RayWorkerProc"
PROXY, MANAGER, HAPROXY, CONTROLLER = (
    "ProxyActor",
    "HAProxyManager",
    "bin/haproxy",
    "ServeController",
)


def chaos_config(silence_s: float = 2.0, hang_s: float = 6.0) -> dict[str, Any]:
    """Return configs/stories.yaml with two replicas on different nodes, and short timeouts."""
    config = shipped_config()
    application = config["applications"][0]
    del application["args"]["encoders"]
    application["args"] |= {"silence_timeout_s": silence_s, "hang_timeout_s": hang_s}
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Embedder"]
    router, replica = application["deployments"]
    router["num_replicas"] = ROUTERS
    router["ray_actor_options"] = {"num_cpus": 0.1, "resources": {"ingress": 1}}
    replica["num_replicas"] = REPLICAS
    replica["ray_actor_options"]["resources"] = {"engine": 1}
    replica |= {"health_check_period_s": 1, "health_check_timeout_s": 5}
    return config


def across_nodes(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with two workers per engine, on two nodes.

    configs/tp4-across-nodes.yaml does the same with four workers.
    """
    application = config["applications"][0]
    engine, replica = application["args"]["engine"], application["deployments"][1]
    del engine["distributed_executor_backend"], replica["ray_actor_options"]["resources"]
    engine["tensor_parallel_size"] = 2
    replica["placement_group_bundles"] = [{"CPU": 1, "GPU": 1}, {"GPU": 1}]
    replica["placement_group_strategy"] = "STRICT_SPREAD"
    del replica["ray_actor_options"]["runtime_env"]["env_vars"]["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return config


@dataclass
class Stage:
    """A served cluster, and its state as seen from outside.

    workers: number of worker actors of each engine. 0: the engines have no worker actors.
    proxies: the processes in front of the routers, by a part of their command line.
    """

    cluster: Cluster
    server: ServeProcess
    workers: int = 0
    proxies: tuple[str, ...] = (PROXY,)

    def used_nodes(self) -> list[Node]:
        return [node for node in self.cluster.nodes[1:] if self.cluster.find(REPLICA, node)]

    def whole(self) -> bool:
        """Return whether all processes run and an ingress reports all replicas."""
        expected = {
            REPLICA: REPLICAS,
            ENGINE: REPLICAS,
            ROUTER: ROUTERS,
            WORKER: self.workers * REPLICAS,
        }
        expected |= dict.fromkeys(self.proxies, 1)
        if any(len(self.cluster.find(name)) < wanted for name, wanted in expected.items()):
            return False
        with suppress(httpx.HTTPError):
            ready = httpx.get(f"{self.server.url}/ready", timeout=10).status_code == 200
            return ready and self.server.replicas() >= REPLICAS
        return False

    def counted(self) -> Counter[str]:
        """How many requests all routers have sent again, and how many streams they have moved.

        A scrape reaches only one router, so it scrapes several times.
        """
        found: dict[tuple[str, str], float] = {}
        for _ in range(12):
            with suppress(httpx.HTTPError):
                told = httpx.get(f"{self.server.url}/metrics", timeout=5).text
                counters = rf'cfg_serve_({RETRIED}|{MOVED})_total{{ingress="(\w+)"}} (\S+)'
                found |= {(name, i): float(n) for name, i, n in re.findall(counters, told)}
        totals: Counter[str] = Counter()
        for (name, _), number in found.items():
            totals[name] += int(number)
        return totals

    def add_node(self) -> None:
        self.cluster.add(gpus=1) if self.workers else self.cluster.add(engine=1)


def send(sign: signal.Signals, name: str, everywhere: bool = False) -> Callable[[Stage], None]:
    def strike(stage: Stage) -> None:
        node = None if everywhere else stage.used_nodes()[0]
        victim = stage.cluster.find(name, node)[0]
        victim.send_signal(sign)

    return strike


def kill_node(stage: Stage) -> None:
    stage.used_nodes()[0].kill()
    stage.add_node()


def cut_link(stage: Stage) -> None:
    stage.used_nodes()[0].cut()
    stage.add_node()


def fill_disk(stage: Stage) -> None:
    """Fill the file system of the logs to the last byte. It must be a small one."""
    with suppress(OSError), (stage.cluster.folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(2**20))
    with suppress(OSError), (stage.cluster.folder / "filler2").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"\0")


FAULTS: dict[str, tuple[str, Callable[[Stage], None]]] = {
    "engine": ("EngineCore killed", send(signal.SIGKILL, ENGINE)),
    "worker": ("tensor-parallel worker killed", send(signal.SIGKILL, WORKER, everywhere=True)),
    "hung-worker": (
        "tensor-parallel worker stopped (hangs)",
        send(signal.SIGSTOP, WORKER, everywhere=True),
    ),
    "replica": ("replica killed", send(signal.SIGKILL, REPLICA)),
    "router": ("router killed", send(signal.SIGKILL, ROUTER, everywhere=True)),
    "proxy": (
        "proxy killed",
        lambda stage: send(signal.SIGKILL, stage.proxies[0], everywhere=True)(stage),
    ),
    "haproxy": ("HAProxy killed", send(signal.SIGKILL, HAPROXY, everywhere=True)),
    "controller": ("controller killed", send(signal.SIGKILL, CONTROLLER, everywhere=True)),
    "hung-engine": ("EngineCore stopped (hangs)", send(signal.SIGSTOP, ENGINE)),
    "hung-replica": ("replica stopped (hangs)", send(signal.SIGSTOP, REPLICA)),
    "node": ("node killed", kill_node),
    "link": ("link to a node cut", cut_link),
    "disk": ("disk of the logs full", fill_disk),
}


SPECIAL = ("worker", "hung-worker", "haproxy")
"""Faults that need one of the options."""


@dataclass
class Row:
    """The result of one fault.

    It counts the requests that were in flight when the fault was injected, and those that were sent
    until the service was restored.
    """

    fault: str
    in_flight: int
    asked: int
    right: int
    lost: int
    wrong: int
    retried: int
    moved: int
    told: dict[str, int]
    last_error_s: float | None
    slowest_s: float
    pause_s: float
    whole_s: float | None

    def __str__(self) -> str:
        told = ", ".join(f"{count} {kind}" for kind, count in self.told.items()) or "-"
        last = "-" if self.last_error_s is None else f"{self.last_error_s:.1f}"
        whole = "not reached" if self.whole_s is None else f"{self.whole_s:.0f}"
        return (
            f"| {self.fault} | {self.in_flight} | {self.asked} | {self.right} | {self.lost} |"
            f" {self.wrong} | {self.retried} | {self.moved} | {told} | {last} |"
            f" {self.slowest_s:.0f} | {self.pause_s:.1f} | {whole} |"
        )


HEADER = (
    "| fault | in flight | asked until whole | right | lost without an error | wrong | retried,"
    " unseen | moved | errors told | last error told after, s | longest request, s | longest pause"
    " of a stream, s | whole again after, s |\n" + "|---" * 13 + "|"
)


async def strike(stage: Stage, load: Load, name: str) -> Row:
    """Run clients, inject a fault, wait until the service is restored, and judge all requests."""
    told, breaks = FAULTS[name]
    load.outcomes.clear()
    before = await asyncio.to_thread(stage.counted)
    stop = asyncio.Event()
    clients = asyncio.ensure_future(load.run(stop))
    await asyncio.sleep(8)
    at = time.monotonic()
    await asyncio.to_thread(breaks, stage)
    whole_s = await until_whole(stage, load, at)
    stop.set()
    await clients
    seen = [outcome for outcome in load.outcomes if outcome.ended > at]
    # A router that was killed has taken its counts with it.
    return judge(told, seen, at, whole_s, await asyncio.to_thread(stage.counted) - before)


async def until_whole(stage: Stage, load: Load, at: float) -> float | None:
    """Return the seconds from `at` until the service was restored. None: it was not."""
    while time.monotonic() - at < RECOVERY_LIMIT_S:
        since = time.monotonic()
        if await asyncio.to_thread(stage.whole):
            await asyncio.sleep(CALM_S)
            calm = all(o.kind == "right" for o in load.outcomes if o.ended > since)
            if calm and await asyncio.to_thread(stage.whole):
                return since - at
        await asyncio.sleep(0.5)
    return None


def judge(
    told: str, seen: list[Outcome], at: float, whole_s: float | None, counted: Counter[str]
) -> Row:
    kinds = [outcome.kind for outcome in seen]
    errors = [outcome for outcome in seen if outcome.kind not in ("right", "wrong", "lost")]
    return Row(
        fault=told,
        in_flight=sum(outcome.started < at for outcome in seen),
        asked=len(seen),
        right=kinds.count("right"),
        lost=kinds.count("lost"),
        wrong=kinds.count("wrong"),
        retried=counted[RETRIED],
        moved=counted[MOVED],
        told={kind: kinds.count(kind) for kind in sorted({e.kind for e in errors})},
        last_error_s=max((e.ended - at for e in errors), default=None),
        slowest_s=max(outcome.ended - outcome.started for outcome in seen),
        pause_s=max(outcome.pause for outcome in seen),
        whole_s=whole_s,
    )


def stage_of(
    cluster: Cluster, clients: int, workers: int = 0, proxies: tuple[str, ...] = (PROXY,)
) -> tuple[Stage, Load]:
    """Serve on a new cluster, and learn the right answers.

    workers: number of workers of each engine, each on its own node. 0: no separate workers.
    """
    for _ in range(REPLICAS * max(1, workers) + 1):
        cluster.add(gpus=1) if workers else cluster.add(engine=1)
    config = chaos_config()
    server = cluster.serve(across_nodes(config) if workers else config)
    stage = Stage(cluster, server, workers, proxies)
    server.wait_until_ready()
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while not stage.whole() and time.monotonic() < deadline:
        time.sleep(1)
    load = Load(server.url, clients)
    asyncio.run(load.learn())
    return stage, load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=[n for n in FAULTS if n not in SPECIAL]
    )
    parser.add_argument(
        "--haproxy",
        action="store_true",
        help="put HAProxy in front; the fault `proxy` then kills its manager",
    )
    parser.add_argument(
        "--across-nodes",
        action="store_true",
        help="two workers per engine; the fault `worker` kills one",
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--folder", type=Path, help="folder of Ray's files; for `disk`, on a small file system"
    )
    args = parser.parse_args()
    rows = []
    env = {"PYTHONPATH": str(RAY_CPU)} if args.across_nodes else {}
    if args.haproxy:
        env |= haproxy_env()
    proxies = (MANAGER, HAPROXY) if args.haproxy else (PROXY,)
    with Cluster(linked="link" in args.faults, folder=args.folder, env=env) as cluster:
        stage, load = stage_of(cluster, args.clients, 2 if args.across_nodes else 0, proxies)
        try:
            print(HEADER, flush=True)
            for name in args.faults:
                rows.append(asyncio.run(strike(stage, load, name)))
                print(rows[-1], flush=True)
                for outcome in load.outcomes:
                    if outcome.kind in ("lost", "wrong"):
                        print(f"  {outcome.kind}: {outcome.detail}", flush=True)
        finally:
            stage.server.stop()
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
