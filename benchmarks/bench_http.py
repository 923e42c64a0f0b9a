"""What the way from a client to the engine costs: this application beside `vllm serve`, on the same engine.

    python benchmarks/bench_http.py [--requests 240] [--modes stock proxy haproxy]

Starts `vllm serve` with the plugin, and the Serve application: with Serve's own settings (`stock`), with those of
configs/serve.env (`proxy`), and with these and HAProxy in place of Serve's own proxy (`haproxy`). The same requests go
to all of them in turns, 1, 8 and 32 at a time: plain, 8 tokens, streamed or (`--whole`) not. `added` is the median of
the time to the last byte less the engine's own, which is the median of `vllm serve` less what its way costs: its mean
less its engine's (`e2e_request_latency`).

All share the cores of one machine with the client, so with many clients the rows show throughput, not latency. Servers
are stopped (SIGSTOP) while it is not their turn: an idle Ray takes a part of a core.
Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serve"), str(HERE)]

from bench_embeddings import card  # noqa: E402
from serve_process import ServeProcess, free_port, haproxy_env, shipped_config  # noqa: E402

CLIENTS = (1, 8, 32)
TOKENS = 8
START_LIMIT_S = 300
SETTLE_S = 1.0


@dataclass
class Server:
    url: str
    processes: Callable[[], list[psutil.Process]]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, sig: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(sig)


@contextmanager
def vllm_serve() -> Iterator[Server]:
    """`vllm serve` on the embedded model with the options of configs/cfg.yaml."""
    application = shipped_config()["applications"][0]
    options = {k: v for k, v in application["args"]["engine"].items() if k != "distributed_executor_backend"}
    flags = subprocess.run([sys.executable, "-m", "cfg_core.vllm_plugin"], check=True, capture_output=True, text=True)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(ROOT / "models" / "stories")]
    command += flags.stdout.split()
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    port = free_port()
    (replica,) = (d for d in application["deployments"] if d["name"] == "ModelReplica")
    env = {**os.environ, **replica["ray_actor_options"]["runtime_env"]["env_vars"]}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--served-model-name", "stories", "--host", "127.0.0.1", "--port", str(port)],
            env=env,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health", process)
            tree = psutil.Process(process.pid)
            yield (server := Server(url, lambda: [tree, *tree.children(recursive=True)]))
        finally:
            server.go_on()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"{url} did not come up")


VLLM = "vllm serve"
MODES = ("stock", "proxy", "haproxy")


@contextmanager
def application(mode: str) -> Iterator[Server]:
    """configs/cfg.yaml without encoders."""
    config = shipped_config()
    app = config["applications"][0]
    del app["args"]["encoders"]
    app["deployments"] = [d for d in app["deployments"] if d["name"] != "Embedder"]
    process = ServeProcess(config, haproxy_env() if mode == "haproxy" else {}, stock=mode == "stock")
    server = Server(process.url, process.processes)
    try:
        process.wait_until_ready()
        yield server
    finally:
        server.go_on()
        process.stop()


async def latencies(url: str, clients: int, num_requests: int, stream: bool) -> list[float]:
    """Seconds from sending to the last byte, of each request."""
    numbers, found = iter(range(num_requests)), []
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask() -> None:
            for number in numbers:
                body = {"prompt": f"Story {number}.", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
                start = time.perf_counter()
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    text = await answer.aread()
                assert not stream or text.endswith(b"data: [DONE]\n\n"), text[-200:]
                found.append(time.perf_counter() - start)

        await asyncio.gather(*(ask() for _ in range(clients)))
    return found


def engine_seconds(url: str) -> tuple[float, float]:
    """(seconds, requests) so far in the engine, from vLLM's own metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    name = "vllm:e2e_request_latency_seconds"
    total, count = (
        sum(float(v) for v in re.findall(rf"^{name}_{part}{{.*}} (\S+)$", text, re.MULTILINE))
        for part in ("sum", "count")
    )
    return total, count


def measure(servers: dict[str, Server], clients: int, num_requests: int, turns: int, stream: bool) -> dict[str, Any]:
    """Median and 95th percentile of each server and the engine's median, in ms. All are paused before and after."""
    taken: dict[str, list[float]] = {name: [] for name in servers}
    engine = [0.0, 0.0]
    for _ in range(turns):
        for name, server in servers.items():
            with on_turn(server):
                asyncio.run(latencies(server.url, clients, clients + 4, stream))  # not counted: caught up after a pause
                before = engine_seconds(server.url) if name == VLLM else (0.0, 0.0)
                taken[name] += asyncio.run(latencies(server.url, clients, num_requests // turns, stream))
                after = engine_seconds(server.url) if name == VLLM else (0.0, 0.0)
            engine = [e + a - b for e, a, b in zip(engine, after, before, strict=True)]
    way = statistics.mean(taken[VLLM]) - engine[0] / engine[1]
    row: dict[str, Any] = {"clients": clients, "engine_ms": 1000 * (statistics.median(taken[VLLM]) - way)}
    for name, values in taken.items():
        ordered = sorted(values)
        row[name] = {"p50_ms": 1000 * statistics.median(ordered), "p95_ms": 1000 * ordered[int(0.95 * len(ordered))]}
    return row


@contextmanager
def on_turn(server: Server) -> Iterator[None]:
    server.go_on()
    time.sleep(SETTLE_S)
    yield
    server.pause()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=240, help="for each server and number of clients")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="not streamed: one answer for each request")
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    print(json.dumps(card()))
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in (VLLM, *args.modes):
            servers[name] = stack.enter_context(vllm_serve() if name == VLLM else application(name))
            asyncio.run(latencies(servers[name].url, 8, 40, stream=True))  # warms up
            servers[name].pause()
        rows = []
        print("| clients | engine | " + " | ".join(f"{name}: p50, p95 (added)" for name in servers) + " |")
        print("|---" * (2 + len(servers)) + "|")
        for clients in args.clients:
            rows.append(row := measure(servers, clients, args.requests, args.turns, not args.whole))
            cells = [
                f"{row[n]['p50_ms']:.1f}, {row[n]['p95_ms']:.1f} ({row[n]['p50_ms'] - row['engine_ms']:+.1f})"
                for n in servers
            ]
            print(f"| {clients} | {row['engine_ms']:.1f} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "http", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
