"""A Ray cluster of several nodes on this machine.

Each node is a real `ray start`. A node is killed by killing all its processes at once.

With `linked=True`, each node but the head runs in its own network namespace. A virtual network link
connects it, and the link can be cut. This needs root and `ip` (Linux).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tools.serving.process import MARK, ServeProcess, free_port, marked, serve_settings, token

START_LIMIT_S = 120

HEAD_ADDRESS = "10.77.{}.1"
NODE_ADDRESS = "10.77.{}.2"


class Node:
    """One `ray start --block`. Its processes are found by a mark in their environment."""

    def __init__(
        self, cluster: Cluster, number: int, resources: dict[str, float], head: bool, gpus: int
    ) -> None:
        self.number, self.mark, self._cluster = number, uuid.uuid4().hex, cluster
        self.is_cut = False
        self.namespace = f"cfgserve{number}" if cluster.linked and not head else None
        if self.namespace:
            self._connect()
        self._process = self._start(resources, head, gpus)

    def _connect(self) -> None:
        """Make a network namespace with one virtual link to this machine."""
        name, outside, inside = self.namespace, f"cfgs{self.number}o", f"cfgs{self.number}i"
        for command in (
            f"ip netns add {name}",
            f"ip link add {outside} type veth peer name {inside}",
            f"ip link set {inside} netns {name}",
            f"ip addr add {HEAD_ADDRESS.format(self.number)}/24 dev {outside}",
            f"ip link set {outside} up",
            f"ip -n {name} addr add {NODE_ADDRESS.format(self.number)}/24 dev {inside}",
            f"ip -n {name} link set {inside} up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} route add default via {HEAD_ADDRESS.format(self.number)}",
        ):
            subprocess.run(command.split(), check=True)

    def cut(self) -> None:
        """Cut the link. No packet arrives any more, and no peer is notified."""
        subprocess.run(["ip", "link", "set", f"cfgs{self.number}o", "down"], check=True)
        self.is_cut = True

    def _start(self, resources: dict[str, float], head: bool, gpus: int) -> subprocess.Popen[bytes]:
        cluster = self._cluster
        where = ["--head", f"--port={cluster.port}"] if head else [f"--address={cluster.address}"]
        command = [
            *(["ip", "netns", "exec", self.namespace] if self.namespace else []),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where),
            *("--disable-usage-stats", "--num-cpus=4", "--object-store-memory=100000000"),
            *(f"--num-gpus={gpus}", f"--resources={json.dumps(resources)}"),
        ]
        if head:
            command += [
                f"--temp-dir={cluster.folder}",
                "--include-dashboard=false",
                *cluster.head_options,
            ]
        if cluster.linked:
            address = HEAD_ADDRESS.format(0) if head else NODE_ADDRESS.format(self.number)
            command.append(f"--node-ip-address={address}")
        log = cluster.folder / f"node{self.number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**cluster.env, MARK: self.mark},
                stdout=out,
                stderr=out,
                process_group=0,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while "will now block forever" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(
                    f"ray start failed:\n{log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.2)
        return process

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)

    def kill(self) -> None:
        """Kill all processes of the node at once, as a power cut would."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to `ray start`, as Kubernetes does to a pod's first process."""
        self._process.terminate()

    def close(self) -> None:
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        if self.namespace:
            subprocess.run(["ip", "netns", "del", self.namespace], check=False)
            subprocess.run(
                ["ip", "link", "del", f"cfgs{self.number}o"], check=False, stderr=subprocess.DEVNULL
            )


class Cluster:
    """A head node, and the nodes that `add` starts. Use it as a context manager."""

    def __init__(
        self,
        linked: bool = False,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
        head_options: Sequence[str] = (),
    ) -> None:
        self.linked, self.head_options = linked, head_options
        # A short path, because Ray puts sockets in it.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="cc", dir="/tmp"))
        self.port = free_port()
        host = HEAD_ADDRESS.format(0) if linked else "127.0.0.1"
        self.env = {
            **os.environ,
            **serve_settings(),
            **(login := token()),
            "HF_HUB_OFFLINE": "1",
            "RAY_TMPDIR": str(self.folder),
            **(env or {}),
        }
        if linked:
            subprocess.run(["ip", "addr", "replace", f"{host}/32", "dev", "lo"], check=True)
        self.address, self._login = f"{host}:{self.port}", login
        self.nodes: list[Node] = []
        self.head = self.add(head=True, ingress=100)

    def add(self, head: bool = False, gpus: int = 0, **resources: float) -> Node:
        """Start a node.

        gpus: number of GPUs that Ray is told of. With the platform tests/support/ray_cpu they are
            CPUs.
        resources: the node's custom resources.
        """
        node = Node(self, len(self.nodes), resources, head, gpus)
        self.nodes.append(node)
        return node

    def serve(self, config: dict[str, Any], **env: str) -> ServeProcess:
        """Run `serve run` on this cluster.

        Processes that it starts on other nodes belong to those nodes, which end them.
        """
        extra = {"RAY_ADDRESS": self.address, "RAY_TMPDIR": str(self.folder), **self._login, **env}
        return ServeProcess(config, extra, address=self.address)

    def processes(self) -> list[psutil.Process]:
        return [process for node in self.nodes for process in node.processes()]

    def find(self, words: str, node: Node | None = None) -> list[psutil.Process]:
        """Return the processes whose command line contains `words`.

        It looks on `node`, or on all nodes whose link is not cut. It leaves out stopped processes.
        """
        found = []
        nodes = [node for node in ([node] if node else self.nodes) if not node.is_cut]
        for process in (process for node in nodes for process in node.processes()):
            with suppress(psutil.Error):
                if (
                    words in " ".join(process.cmdline())
                    and process.status() != psutil.STATUS_STOPPED
                ):
                    found.append(process)
        return found

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.close()
        if self.linked:
            subprocess.run(
                ["ip", "addr", "del", f"{HEAD_ADDRESS.format(0)}/32", "dev", "lo"], check=False
            )
        shutil.rmtree(self.folder, ignore_errors=True)
