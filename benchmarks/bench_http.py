"""What the way from a client to the engine costs: this application beside `vllm serve`, on the same engine.

    python benchmarks/bench_http.py [--requests 200] [--modes proxy haproxy tuned]

Starts `vllm serve` with the plugin, and the Serve application, by Serve's own proxy (`proxy`), with HAProxy in front
(`haproxy`, `RAY_SERVE_ENABLE_HA_PROXY=1`), and so with gRPC between the replicas and fewer event loops (`tuned`,
`RAY_SERVE_THROUGHPUT_OPTIMIZED=1` as well). The same requests go to all of them in turns, 1, 8 and 32 at a time:
plain, 8 tokens, streamed or (`--whole`) not. `added` is the median of the time to the last byte less the engine's own
mean, which `vllm serve` reports of its engine (`e2e_request_latency`) for the same requests.

All share the cores of one machine with the client, so with many clients the rows show throughput, not latency.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serve"), str(HERE)]

from bench_embeddings import card  # noqa: E402
from serve_process import ServeProcess, free_port, haproxy_env, shipped_config  # noqa: E402

CLIENTS = (1, 8, 32)
TOKENS = 8
START_LIMIT_S = 300


@contextmanager
def vllm_serve() -> Iterator[str]:
    """`vllm serve` on the embedded model with the options of configs/cfg.yaml; its URL."""
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
            yield url
        finally:
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


MODES = ("proxy", "haproxy", "tuned")
TUNED = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",  # ServeProcess reads it
}


def environment(mode: str) -> dict[str, str]:
    return {} if mode == "proxy" else haproxy_env() | (TUNED if mode == "tuned" else {})


@contextmanager
def application(mode: str) -> Iterator[str]:
    """configs/cfg.yaml without encoders; its URL."""
    config = shipped_config()
    app = config["applications"][0]
    del app["args"]["encoders"]
    app["deployments"] = [d for d in app["deployments"] if d["name"] != "Embedder"]
    server = ServeProcess(config, environment(mode))
    try:
        server.wait_until_ready()
        yield server.url
    finally:
        server.stop()


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
    """(seconds, requests) so far in the engine of `vllm serve`."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    name = "vllm:e2e_request_latency_seconds"
    total, count = (
        sum(float(v) for v in re.findall(rf"^{name}_{part}{{.*}} (\S+)$", text, re.MULTILINE))
        for part in ("sum", "count")
    )
    return total, count


def measure(urls: dict[str, str], clients: int, num_requests: int, turns: int, stream: bool) -> dict[str, Any]:
    """Median and 95th percentile of each server, in ms, and the engine's own mean."""
    taken: dict[str, list[float]] = {name: [] for name in urls}
    before = engine_seconds(urls["vllm serve"])
    for _ in range(turns):
        for name, url in urls.items():
            taken[name] += asyncio.run(latencies(url, clients, num_requests // turns, stream))
    seconds, count = (after - b for after, b in zip(engine_seconds(urls["vllm serve"]), before, strict=True))
    row: dict[str, Any] = {"clients": clients, "engine_mean_ms": 1000 * seconds / count}
    for name, values in taken.items():
        ordered = sorted(values)
        row[name] = {"p50_ms": 1000 * statistics.median(ordered), "p95_ms": 1000 * ordered[int(0.95 * len(ordered))]}
    return row


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
        urls = {"vllm serve": stack.enter_context(vllm_serve())}
        for mode in args.modes:
            urls[mode] = stack.enter_context(application(mode))
        for url in urls.values():
            asyncio.run(latencies(url, 8, 40, stream=True))  # warms up
        rows = []
        print("| clients | engine, mean | " + " | ".join(f"{name}: p50, p95 (added)" for name in urls) + " |")
        print("|---" * (2 + len(urls)) + "|")
        for clients in args.clients:
            rows.append(row := measure(urls, clients, args.requests, args.turns, not args.whole))
            cells = [
                f"{row[n]['p50_ms']:.1f}, {row[n]['p95_ms']:.1f} ({row[n]['p50_ms'] - row['engine_mean_ms']:+.1f})"
                for n in urls
            ]
            print(f"| {clients} | {row['engine_mean_ms']:.1f} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "http", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
