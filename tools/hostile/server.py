"""The server under attack: its configuration, or one that runs already, and its memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

import psutil

from tools.serving.process import REPOSITORY, ServeProcess, memory_of, shipped_config

KEYS = {"watcher": "key-of-watchers", "attacker": "key-of-attackers", "limited": "key-with-limits"}
LIMITED_TOKENS = 3000
"""Tokens that the key `limited` may use in a minute."""


def keyed_config() -> dict[str, Any]:
    """Return the shipped configuration with three keys.

    One key is for the watchers, one for attackers, and one has a small rate.
    """
    config = shipped_config()
    keys: list[dict[str, Any]] = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in KEYS.items()
    ]
    keys[-1]["tokens_per_minute"] = LIMITED_TOKENS
    config["applications"][0]["args"]["access"] = {"keys": keys}
    return config


STAND_IN = REPOSITORY / "tests" / "support" / "torchvision_stand_in"
MAX_BODY_BYTES = 160 * 2**20
"""Bound on bodies of the server whose model reads images."""


def seeing_config(folder: str) -> dict[str, Any]:
    """Return the shipped configuration with a tiny LLaVA, which is made in `folder`.

    Its hosts of images are on this machine, so this address is allowed. Bodies may be large.
    """
    build = (
        "import pathlib, sys; from tests.engine.tiny_vision import build_vision; "
        "build_vision('llava', pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", build, folder], cwd=REPOSITORY, check=True)
    config = shipped_config()
    args = config["applications"][0]["args"]
    args |= {"model": folder, "served_model_name": "stories"}
    args["engine"] |= {
        "allowed_media_domains": ["127.0.0.1"],
        "limit_mm_per_prompt": {"image": 16},
    }
    args["access"] = {"max_body_bytes": MAX_BODY_BYTES}
    args["limits"] |= {
        "max_body_bytes_at_once": 3 * MAX_BODY_BYTES,
        "max_body_bytes_per_client": 2 * MAX_BODY_BYTES,
    }
    return config


def seeing_env() -> dict[str, str]:
    """Return the environment of the server with `seeing_config`."""
    return {
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]),
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(4 * MAX_BODY_BYTES),
    }


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


class Running:
    """A server that was not started here.

    Its processes are found if it runs on this machine.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def processes(self) -> list[psutil.Process]:
        """Return the raylet that started the listening proxy, and all its descendants."""
        port = urlsplit(self.url).port
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                raylet = psutil.Process(connection.pid).parent()
                return [raylet, *raylet.children(recursive=True)] if raylet else []
        return []

    def memory_bytes(self) -> int:
        return memory_of(self.processes())


class Peak:
    """Measures the maximum of the server's memory, until `end` is called."""

    def __init__(self, server: ServeProcess | Running, every_s: float = 4.0) -> None:
        self._server, self._every_s = server, every_s
        self._most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()

    def _measure(self) -> None:
        while not self._over.wait(self._every_s):
            self._most = max(self._most, self._server.memory_bytes())

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most
