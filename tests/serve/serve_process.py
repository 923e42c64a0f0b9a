"""`serve run` as a child process: a real Ray, a real HTTP port, nothing left behind."""

from __future__ import annotations

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(REPOSITORY / "scripts"))

from serve_env import serve_settings  # noqa: E402

START_LIMIT_S = 300
MARK = "CFG_SERVE_TEST"
_UNSET = ("RAY_ADDRESS", "VLLM_CPU_KVCACHE_SPACE", "PYTEST_CURRENT_TEST")


class ServeProcess:
    """One `serve run CONFIG` on free ports, with a Ray of its own, or on the one at `address`.
    `stop()` ends every process it caused. stock: with Serve's own settings and without a token, as
    `serve run` by itself.

    The processes carry a mark in their environment, so that those which Ray detaches are found too.
    """

    def __init__(
        self,
        config: dict[str, Any],
        extra_env: dict[str, str] | None = None,
        address: str = "local",
        stock: bool = False,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._dir = Path(
            tempfile.mkdtemp(prefix="cs", dir="/tmp")
        )  # short: Ray puts socket paths in it
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
            **({"RAY_AUTH_MODE": "disabled"} if stock else serve_settings() | token()),
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
                # Not a session of its own: Linux may share the CPUs out by sessions
                # (sched_autogroup_enabled), and lets one that needs little, such as that of the
                # clients who measure, wait for half a second.
                process_group=0,
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.SIG_DFL
                ),  # ignored where tests run in the background
            )

    def wait_until_ready(self) -> float:
        """Seconds from the start to the first 200 of /ready. Fails with the end of the log if that
        never comes."""
        while time.monotonic() - self.started < START_LIMIT_S:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return time.monotonic() - self.started
            if self._process.poll() is not None or "failed with exception" in self.tail():
                break
            time.sleep(0.5)
        raise AssertionError(f"serve run did not get ready:\n{self.tail(200)}")

    def replicas(self) -> int:
        """Those of the generator, as the ingress that answers sees them."""
        told = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(r"^cfg_serve_replicas{.*} (\S+)$", told, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def tail(self, num_lines: int = 50) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def processes(self) -> list[psutil.Process]:
        """Every process that this one caused and that still runs."""
        return marked(self._mark)

    def memory_bytes(self) -> int:
        """Memory of all its processes, with shared pages counted once (PSS)."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def __enter__(self) -> ServeProcess:
        """Returns when it is ready."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As Ctrl-C would; whatever is left after that is killed."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self._process.wait(timeout=10)
        shutil.rmtree(self._dir, ignore_errors=True)


def token() -> dict[str, str]:
    """Ray's own authentication, as `make serve` has it."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def marked(mark: str) -> list[psutil.Process]:
    """Every process with this mark in its environment that still runs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def haproxy_env() -> dict[str, str]:
    """Serve behind HAProxy, whose own ports are the same everywhere unless told otherwise: two on a
    machine collide."""
    ports = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", **{name: str(free_port()) for name in ports}}


def shipped_config(name: str = "cfg") -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text())
