"""`serve run` as a child process, with a real Ray and a real HTTP port.

All processes and files are removed at the end.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

import httpx
import psutil
import yaml

from cfg_serve.home import serve_settings as serve_settings

REPOSITORY = Path(__file__).resolve().parent.parent.parent
Json: TypeAlias = dict[str, Any]
"""A JSON object: a request body, an answer, or a configuration as YAML holds it."""

START_LIMIT_S = 300
MARK = "CFG_SERVE_TEST"
STOCK = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    "RAY_worker_niceness": "0",
}
"""Serve's own settings, but for those without which no start ends on a busy machine: serve.env says
why. Other tests run beside this server.
"""

_UNSET = ("RAY_ADDRESS", "VLLM_CPU_KVCACHE_SPACE", "PYTEST_CURRENT_TEST")


class ServeProcess:
    """One `serve run CONFIG` on a free port.

    `stop()` ends every process that it started, in order; `kill()` ends them at once. The processes
    carry a mark in their environment, so processes that Ray has detached are found too. At the end
    of a `with` block they are killed.

    address: of a running Ray. By default, `serve run` starts a Ray of its own.
    stock: run with Serve's own settings and without a token, as plain `serve run` does (STOCK).
    """

    def __init__(
        self,
        config: Json,
        extra_env: dict[str, str] | None = None,
        address: str = "local",
        stock: bool = False,
    ) -> None:
        self._mark = uuid.uuid4().hex
        # A short path, because Ray puts sockets in it.
        self._dir = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))
        config["http_options"]["port"] = port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        path = self._dir / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        self.log = self._dir / "log"
        env = {name: value for name, value in os.environ.items() if name not in _UNSET}
        env |= {
            MARK: self._mark,
            "RAY_TMPDIR": str(self._dir),
            "TMPDIR": str(self._dir),
            "HF_HUB_OFFLINE": "1",
            "FORWARDED_ALLOW_IPS": "127.0.0.1",  # clients of hostile.py have addresses
            **(STOCK if stock else serve_settings() | token()),
        }
        env |= extra_env or {}
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.serve.scripts", "run", "--address", address, str(path)],
                cwd=REPOSITORY,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The child does not get a session of its own. Linux may distribute CPU time by
                # session (sched_autogroup_enabled). A session that needs little CPU time, such as
                # that of the measuring clients, may then wait for half a second.
                process_group=0,
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.SIG_DFL
                ),  # in a background job SIGINT is ignored
            )

    def wait_until_ready(self) -> float:
        """Wait until /ready answers 200. Return the seconds since the start.

        Raises AssertionError with the end of the log if that does not happen.
        """
        while time.monotonic() - self.started < START_LIMIT_S:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return time.monotonic() - self.started
            if self._process.poll() is not None or "failed with exception" in self.tail():
                break
            time.sleep(0.5)
        raise AssertionError(f"serve run did not get ready:\n{self.tail(200)}")

    def replicas(self) -> int:
        """Return the number of generator replicas that the ingress reports in /metrics."""
        told = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(r"^cfg_serve_replicas{.*} (\S+)$", told, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def ray_metrics(self) -> list[str]:
        """Return the addresses of the metrics of its own Ray, as Ray tells Prometheus."""
        told = json.loads((self._dir / "ray" / "prom_metrics_service_discovery.json").read_text())
        return [str(address) for entry in told for address in entry["targets"]]

    def ray_logs(self) -> dict[str, list[str]]:
        """Return the lines of all log files of its own Ray, by their paths."""
        folder = self._dir / "ray" / "session_latest" / "logs"
        return {
            str(path): path.read_text(errors="replace").splitlines()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def tail(self, num_lines: int = 50) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def processes(self) -> list[psutil.Process]:
        """Return every process that this one started and that still runs."""
        return marked(self._mark)

    def memory_bytes(self) -> int:
        """Return the memory of all its processes, with shared pages counted once (PSS)."""
        return memory_of(self.processes())

    def __enter__(self) -> Self:
        """Return when the server is ready."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def stop(self) -> None:
        """Send SIGINT as Ctrl-C does, wait, and then kill the processes that are left."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        self.kill()

    def kill(self) -> None:
        deadline = time.monotonic() + 10
        # Ray may start a process while its others are killed.
        while (processes := self.processes()) and time.monotonic() < deadline:
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
        self._process.wait(timeout=10)
        shutil.rmtree(self._dir, ignore_errors=True)


def memory_of(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of the processes, with shared pages counted once (PSS)."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def token() -> dict[str, str]:
    """Return the environment of Ray's own authentication, as `make serve` sets it."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def marked(mark: str) -> list[psutil.Process]:
    """Return every running process with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def haproxy_env() -> dict[str, str]:
    """Return the environment that puts HAProxy in front of Serve.

    HAProxy's own ports have fixed defaults, so two instances on a machine would collide. They get
    free ports here.
    """
    ports = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", **{name: str(free_port()) for name in ports}}


def shipped_config(name: str = "stories") -> Json:
    """Return configs/NAME.yaml. Tests use the small model, unless they are about another file."""
    config: Json = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text())
    return config


def grammars_later(config: Json) -> Json:
    """Let the processes that check grammars start with the first grammar, as none may come.

    Such a process takes as much CPU time to start as an engine, most of it to import vLLM.
    """
    for application in config["applications"]:
        application["args"]["grammars"] = {"at_start": False}
    return config


def config_with_model(folder: Path, name: str, **engine: Any) -> Json:
    """Return configs/cfg.yaml with the model in `folder`, served as `name`, in float32."""
    config = shipped_config("cfg")
    args = config["applications"][0]["args"]
    del args["fallback"]
    args |= {"model": str(folder), "served_model_name": name}
    args["engine"] |= {"dtype": "float32", **engine}
    return config
