"""Servers that take turns: each is stopped (SIGSTOP) while it is not its turn."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from tools.serving.process import ServeProcess, haproxy_env, shipped_config

SETTLE_S = 1.0


@dataclass
class Server:
    url: str
    processes: Callable[[], list[psutil.Process]]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def on_turn(self) -> Iterator[None]:
        self.go_on()
        time.sleep(SETTLE_S)
        yield
        self.pause()

    def _signal(self, sig: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(sig)


def without_encoders(name: str = "stories") -> tuple[dict[str, Any], dict[str, Any]]:
    """A shipped configuration with its generator alone, and the application in it."""
    config = shipped_config(name)
    app: dict[str, Any] = config["applications"][0]
    app["args"]["encoders"] = []
    app["deployments"] = [d for d in app["deployments"] if d["name"] != "Embedder"]
    return config, app


@contextmanager
def application(
    config: dict[str, Any],
    *,
    haproxy: bool,
    stock: bool = False,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """haproxy: in place of Serve's own proxy. stock: with Serve's own settings."""
    process = ServeProcess(
        config, {**(haproxy_env() if haproxy else {}), **(env or {})}, stock=stock
    )
    server = Server(process.url, process.processes)
    try:
        process.wait_until_ready()
        yield server
    finally:
        server.go_on()
        process.stop()
