"""The faults: how each is injected."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from contextlib import suppress

from tools.chaos.stage import CONTROLLER, ENGINE, HAPROXY, REPLICA, ROUTER, WORKER, Stage


def send(sign: signal.Signals, name: str, everywhere: bool = False) -> Callable[[Stage], None]:
    def strike(stage: Stage) -> None:
        node = None if everywhere else stage.used_nodes()[0]
        victim = stage.cluster.find(name, node)[0]
        victim.send_signal(sign)

    return strike


def terminate_node(stage: Stage) -> None:
    """As Kubernetes ends a pod. Ray drains the node, for up to 30 s."""
    stage.used_nodes()[0].terminate()
    stage.add_node()


def scale_down(stage: Stage) -> None:
    """To one replica less, and back."""
    fewer = copy.deepcopy(stage.config)
    fewer["applications"][0]["deployments"][1]["num_replicas"] -= 1
    wanted = stage.replicas - 1
    stage.deploy(fewer)
    stage.wait_for(lambda: len(stage.cluster.find(REPLICA)) == wanted)
    stage.deploy(stage.config)


def roll_out(stage: Stage) -> None:
    """Another number of slots, so that each replica is replaced, one after another."""
    before = {process.pid for process in stage.cluster.find(REPLICA)}
    stage.config["applications"][0]["args"]["engine"]["max_num_seqs"] -= 1
    stage.deploy(stage.config)
    stage.wait_for(lambda: before.isdisjoint(p.pid for p in stage.cluster.find(REPLICA)))


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
    "terminated-node": ("SIGTERM to a node", terminate_node),
    "scale-down": ("a replica less, then again one more", scale_down),
    "rollout": ("rolling update", roll_out),
    "link": ("link to a node cut", cut_link),
    "disk": ("disk of the logs full", fill_disk),
}


SPECIAL = ("worker", "hung-worker", "haproxy")
"""Faults that need one of the options."""
