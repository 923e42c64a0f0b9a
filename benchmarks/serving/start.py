"""Cold start by phase: from `make serve` on an installed machine to the first token.

    python -m benchmarks.serving.start [--config configs/cfg.yaml] [--runs 2]

The physics. A start is imports, mostly: each process of the path reads Python modules, and those
that compute import torch and vLLM, 10 to 15 s of CPU time each. Processes start side by side, so
with few cores the CPU time decides, and with many the longest chain does: Ray, Serve's controller,
the replica, its engine process, the weights.

What is timed is `cfg-serve serve`, which `make serve` runs. A process is `seen` when it has its
name, in seconds after the start. Then: when the port listens, when /ready answers 200, and when the
first token of a guided chat is there. `CPU, s` is what each process had used by then, and what it
used in the `--after` seconds that followed, in which nothing is asked. Prints a card, tables, and
one line of JSON. The medians of all runs count, and files are in the page cache.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from cfg_serve.start.environment import free_port
from cfg_serve.start.examples import CHAT

from .. import ROOT
from ..report import Report, parser

LIMIT_S = 300
LOOK_S = 0.1
NAMES = {
    r"cfg_serve serve": "make serve",
    r"cfg_serve\.start\.child": "serve run",
    r"grammar_helper": "the grammar helper",
    r"gcs_server|raylet|log_monitor|dashboard|runtime_env|agent": "Ray",
    r"ray::ServeController|ServeController": "Serve's controller",
    r"ray::ProxyActor|ProxyActor|haproxy": "Serve's proxy",
    r"CfgRouter": "the ingress",
    r"ModelReplica": "the generator's replica",
    r"EngineCore": "the engine",
    r"Embedder|EncoderReplica": "the encoder's replica",
    r"ray::IDLE|default_worker": "Ray's other workers",
}
"""What a process is, by the first expression that its command line has."""


class Watch:
    """The processes below one, by what they are."""

    def __init__(self, pid: int) -> None:
        self._root, self.start = psutil.Process(pid), time.perf_counter()
        self.seen: dict[str, float] = {}
        self._cpu: dict[psutil.Process, tuple[str, float]] = {}

    def now(self) -> float:
        return time.perf_counter() - self.start

    def look(self) -> None:
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                name = next((n for e, n in NAMES.items() if re.search(e, line)), "others")
                self.seen.setdefault(name, self.now())
                self._cpu[process] = name, sum(process.cpu_times()[:2])

    def cpu_s(self) -> dict[str, float]:
        """CPU-seconds by name, of processes that have ended, too."""
        found: dict[str, float] = {}
        for name, seconds in self._cpu.values():
            found[name] = found.get(name, 0.0) + seconds
        return found


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    return False


def one_run(config: Path, after_s: float) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "cfg_serve", "serve", str(config)],
        cwd=ROOT,
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    watch, phases = Watch(process.pid), {}
    checks: dict[str, Callable[[], bool]] = {
        "the port listens": lambda: listens(port),
        "/ready": lambda: ready(url),
    }
    try:
        for name, check in checks.items():
            while not check():
                assert process.poll() is None, "the server ended"
                assert watch.now() < LIMIT_S, f"no {name} after {LIMIT_S} s"
                watch.look()
                time.sleep(LOOK_S)
            phases[name] = watch.now()
        httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 1}, timeout=60)
        phases["first token"] = watch.now()
        watch.look()
        before = watch.cpu_s()
        time.sleep(after_s)
        watch.look()
        after = {name: s - before.get(name, 0.0) for name, s in watch.cpu_s().items()}
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
    return {"seen": watch.seen, "phases": phases, "cpu_s": before, "cpu_after_s": after}


def medians(runs: list[dict[str, Any]], key: str) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run[key])
    return {n: statistics.median(run[key].get(n, 0.0) for run in runs) for n in names}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--config", type=Path, default=ROOT / "configs" / "cfg.yaml")
    options.add_argument("--runs", type=int, default=2)
    options.add_argument("--after", type=float, default=20.0)
    args = options.parse_args()
    report = Report("start", args)
    runs = [one_run(args.config, args.after) for _ in range(args.runs)]
    found = {key: medians(runs, key) for key in runs[0]}
    report.head("process", "seen, s", "CPU, s", f"CPU in the next {args.after:.0f} s")
    for name, seen in sorted(found["seen"].items(), key=lambda item: item[1]):
        spent = (found[key].get(name, 0.0) for key in ("cpu_s", "cpu_after_s"))
        report.row(name, f"{seen:.1f}", *(f"{s:.1f}" for s in spent))
    totals = (sum(found[key].values()) for key in ("cpu_s", "cpu_after_s"))
    report.row("all", "", *(f"{total:.1f}" for total in totals))
    report.head("phase", "s")
    for name, at in found["phases"].items():
        report.row(name, f"{at:.1f}")
    report.end(runs=runs, **found)


if __name__ == "__main__":
    main()
