"""The served cluster of chaos: its configuration, and its state as seen from outside."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import yaml

from tools.chaos.judging import MOVED, RETRIED
from tools.serving.cluster import Cluster, Node
from tools.serving.process import REPOSITORY, ServeProcess, shipped_config

ROUTERS = 2
RECOVERY_LIMIT_S = 600
ENGINE, REPLICA, ROUTER = (
    "EngineCore",
    "ServeReplica:cfg:ModelReplica",
    "ServeReplica:cfg:CfgRouter",
)
WORKER = "RayWorkerProc"
SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 3},
    "draft": {
        "method": "draft_model",
        "model": "models/stories-draft",
        "num_speculative_tokens": 3,
    },
}
PROXY, MANAGER, HAPROXY, CONTROLLER = (
    "ProxyActor",
    "HAProxyManager",
    "bin/haproxy",
    "ServeController",
)


def chaos_config(silence_s: float = 2.0, hang_s: float = 6.0, replicas: int = 2) -> dict[str, Any]:
    """Return configs/stories.yaml with replicas on different nodes, and short timeouts.

    Its answers are short, so a replica that leaves asks them to go on elsewhere at once.
    """
    config = shipped_config()
    application = config["applications"][0]
    del application["args"]["encoders"]
    application["args"] |= {
        "silence_timeout_s": silence_s,
        "hang_timeout_s": hang_s,
        "drain_after_s": 0.0,
    }
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Embedder"]
    router, replica = application["deployments"]
    router["num_replicas"] = ROUTERS
    router["ray_actor_options"] = {"num_cpus": 0.1, "resources": {"ingress": 1}}
    replica["num_replicas"] = replicas
    replica["ray_actor_options"]["resources"] = {"engine": 1}
    replica |= {"health_check_period_s": 1, "health_check_timeout_s": 5}
    return config


def speculating(config: dict[str, Any], method: str) -> dict[str, Any]:
    """Return `config` with one of SPECULATION."""
    config["applications"][0]["args"]["engine"]["speculative_config"] = SPECULATION[method]
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

    config: what it serves.
    workers: number of worker actors of each engine. 0: the engines have no worker actors.
    proxies: the processes in front of the routers, by a part of their command line.
    """

    cluster: Cluster
    server: ServeProcess
    config: dict[str, Any]
    workers: int = 0
    proxies: tuple[str, ...] = (PROXY,)

    @property
    def replicas(self) -> int:
        """How many replicas the configuration wants."""
        return int(self.config["applications"][0]["deployments"][1]["num_replicas"])

    def used_nodes(self) -> list[Node]:
        return [node for node in self.cluster.nodes[1:] if self.cluster.find(REPLICA, node)]

    def whole(self) -> bool:
        """Return whether all processes run and an ingress reports all replicas."""
        expected = {
            REPLICA: self.replicas,
            ENGINE: self.replicas,
            ROUTER: ROUTERS,
            WORKER: self.workers * self.replicas,
        }
        expected |= dict.fromkeys(self.proxies, 1)
        if any(len(self.cluster.find(name)) < wanted for name, wanted in expected.items()):
            return False
        with suppress(httpx.HTTPError):
            ready = httpx.get(f"{self.server.url}/ready", timeout=10).status_code == 200
            return ready and self.server.replicas() >= self.replicas
        return False

    def ready(self) -> int:
        """How many replicas an ingress reports. 0: it does not answer."""
        with suppress(httpx.HTTPError):
            return self.server.replicas()
        return 0

    def counted(self) -> Counter[str]:
        """How many requests all routers have sent again, and how many streams they have moved.

        A scrape reaches only one router, so it scrapes several times.
        """
        found: dict[tuple[str, str], float] = {}
        for _ in range(12):
            with suppress(httpx.HTTPError):
                told = httpx.get(f"{self.server.url}/metrics", timeout=5).text
                counters = rf'cfg_serve_({RETRIED}|{MOVED})_total{{(ingress="\w+".*)}} (\S+)'
                found |= {(name, which): float(n) for name, which, n in re.findall(counters, told)}
        totals: Counter[str] = Counter()
        for (name, _), number in found.items():
            totals[name] += int(number)
        return totals

    def add_node(self) -> None:
        self.cluster.add(gpus=1) if self.workers else self.cluster.add(engine=1)

    def deploy(self, config: dict[str, Any]) -> None:
        """Serve another configuration of the application. It does not wait for its replicas."""
        path = self.cluster.folder / "changed.yaml"
        path.write_text(yaml.safe_dump(config))
        command = ["run", "--non-blocking", "--address", self.cluster.address, str(path)]
        subprocess.run(
            [sys.executable, "-m", "ray.serve.scripts", *command],
            cwd=REPOSITORY,
            env=self.cluster.env,
            check=True,
            timeout=RECOVERY_LIMIT_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Raises AssertionError after RECOVERY_LIMIT_S."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.5)
