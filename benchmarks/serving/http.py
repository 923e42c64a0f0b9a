"""What the way from a client to the engine costs: this application beside `vllm serve`, on the same
engine.

    python -m benchmarks.serving.http [--requests 240] [--modes stock proxy haproxy]

Starts `vllm serve` with the plugin, and the Serve application: with Serve's own settings (`stock`),
with those of configs/serve.env (`proxy`), and with these and HAProxy in place of Serve's own proxy
(`haproxy`). The same requests go to all of them in turns, 1, 8 and 32 at a time: plain, 8 tokens,
streamed or (`--whole`) not. `added` is what a request takes, to the last byte, beyond its engine's
own time, from when the engine queues it to its last token; vLLM tells it with each answer
(`enable_per_request_metrics`).

All share the cores of one machine with the client (aiohttp: httpx takes over a millisecond more for
each request), so with many clients the rows show throughput, not latency. Servers are stopped
(SIGSTOP) while it is not their turn: an idle Ray takes a part of a core. Prints a card, a table,
and one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import sha256
from typing import Any

import aiohttp
import httpx
import psutil

from tools.serving.process import free_port

from .. import ROOT
from ..llm import STORIES
from ..report import Report, parser
from .servers import Server, application, without_encoders

VLLM = "vllm serve"
MODES = ("stock", "proxy", "haproxy")
TOKENS = 8
KEY = "a key of the benchmark"
START_LIMIT_S = 300
CELL = "{p50_ms:.0f}, {p95_ms:.0f} ({engine_p50_ms:.0f}, {added_p50_ms:.1f})"


@contextmanager
def vllm_serve() -> Iterator[Server]:
    """`vllm serve` on the embedded model with the options of configs/stories.yaml."""
    _, app = without_encoders()
    plugin = subprocess.run(
        [sys.executable, "-m", "cfg_core.vllm_plugin"], check=True, capture_output=True, text=True
    )
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(STORIES), "--served-model-name", "stories"]
    command += [*plugin.stdout.split(), "--enable-per-request-metrics"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in app["args"]["engine"].items():
        if name != "distributed_executor_backend":
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
    (replica,) = (d for d in app["deployments"] if d["name"] == "ModelReplica")
    env = {**os.environ, **replica["ray_actor_options"]["runtime_env"]["env_vars"]}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        tree = psutil.Process(process.pid)
        server = Server(f"http://127.0.0.1:{port}", lambda: [tree, *tree.children(recursive=True)])
        try:
            wait_for(f"{server.url}/health", process)
            yield server
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


def in_mode(mode: str) -> AbstractContextManager[Server]:
    """configs/stories.yaml without encoders, and with one API key."""
    config, app = without_encoders()
    app["args"]["frontend"] = {"enable_per_request_metrics": True}
    app["args"]["access"] = {
        "keys": [{"name": "bench", "sha256": sha256(KEY.encode()).hexdigest()}]
    }
    return application(config, haproxy=mode == "haproxy", stock=mode == "stock")


async def latencies(
    url: str, clients: int, num_requests: int, stream: bool
) -> list[tuple[float, float]]:
    """Of each request, in ms: from sending to the last byte, and of this in the engine."""
    numbers, found = iter(range(num_requests)), []
    options = {"stream_options": {"include_usage": True}} if stream else {}

    headers, timeout = {"Authorization": f"Bearer {KEY}"}, aiohttp.ClientTimeout(120)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as client:

        async def ask() -> None:
            for number in numbers:
                body = {
                    "prompt": f"Story {number}.",
                    "max_tokens": TOKENS,
                    "ignore_eos": True,
                    "stream": stream,
                }
                start = time.perf_counter()
                async with client.post("/v1/completions", json=body | options) as answer:
                    answer.raise_for_status()
                    text = await answer.text()
                took = 1000 * (time.perf_counter() - start)
                found.append((took, engine_ms(last_chunk(text) if stream else text)))

        await asyncio.gather(*(ask() for _ in range(clients)))
    return found


def last_chunk(events: str) -> str:
    """The one with the usage, before [DONE]."""
    *_, usage, done = events.strip().split("\n\n")
    assert done == "data: [DONE]", events[-200:]
    return usage.removeprefix("data: ")


def engine_ms(answer: str) -> float:
    metrics: dict[str, float] = json.loads(answer)["metrics"]
    return (
        metrics["queue_time_ms"] + metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    )


def measure(
    servers: dict[str, Server], clients: int, num_requests: int, turns: int, stream: bool
) -> dict[str, Any]:
    """Of each server, in ms: median and 95th percentile, and the median of what is added. All are
    paused before and after."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for _ in range(turns):
        for name, server in servers.items():
            with server.on_turn():
                # Not counted: caught up after a pause.
                asyncio.run(latencies(server.url, clients, clients + 4, stream))
                taken[name] += asyncio.run(
                    latencies(server.url, clients, num_requests // turns, stream)
                )
    row: dict[str, Any] = {"clients": clients}
    for name, values in taken.items():
        ordered = sorted(took for took, _ in values)
        row[name] = {
            "p50_ms": statistics.median(ordered),
            "p95_ms": ordered[int(0.95 * len(ordered))],
            "engine_p50_ms": statistics.median(own for _, own in values),
            "added_p50_ms": statistics.median(took - own for took, own in values),
        }
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--requests", type=int, default=240, help="for each server and number of clients"
    )
    options.add_argument("--turns", type=int, default=4)
    options.add_argument(
        "--whole", action="store_true", help="not streamed: one answer for each request"
    )
    options.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    options.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = options.parse_args()
    report = Report("http", args)
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in (VLLM, *args.modes):
            server = stack.enter_context(vllm_serve() if name == VLLM else in_mode(name))
            asyncio.run(latencies(server.url, 8, 40, stream=True))  # warms up
            server.pause()
            servers[name] = server
        rows = []
        report.head("clients", *(f"{name}: p50, p95 (engine, added)" for name in servers))
        for clients in args.clients:
            rows.append(row := measure(servers, clients, args.requests, args.turns, not args.whole))
            report.row(clients, *(CELL.format(**row[name]) for name in servers))
    report.end(rows=rows)


if __name__ == "__main__":
    main()
