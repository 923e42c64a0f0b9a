"""How many tokens a second one ingress and one replica can stream, if the engine costs nothing.

    python benchmarks/bench_ceiling.py [--streams 32] [--tokens 400] [--turns 3]

The physics. Every process on the path spends CPU time on each token and on each chunk of tokens. On
a GPU, one engine makes thousands of tokens a second, and the slowest of these processes is the
limit for it. So the engine is taken out here (free_engine.py):

- `ingress`: the replica sends ready-made events of one token each. The limit is HAProxy, the
  ingress, or the connection between ingress and replica.
- `replica`: vLLM's frontend in the replica makes texts and events from tokens that cost nothing.
  The limit is the replica's event loop.

Each is measured with direct calls, and with calls through Ray Serve's handle (`direct_calls:
false`), in turns. `tokens/s` is the median over the turns of what all streams get. `CPU` is the
time that the processes of the row took for a token. All processes and the client share the cores of
this machine, so more cores would give more. HAProxy is in front. Prints a card, a table, and one
line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from bench_http import Server, on_turn  # noqa: E402
from card import card  # noqa: E402
from free_engine import SOURCE  # noqa: E402

from tools.serving.process import ServeProcess, haproxy_env, shipped_config  # noqa: E402

PARTS = {"ingress": "replica", "replica": "core"}
"""What is measured, and what must be free for it."""
PROCESSES = {"ingress": "CfgRouter", "replica": "ModelReplica"}
LIMIT_S = 300
SETTLE_S = 30
"""After the start: the replica's helper for grammars imports vLLM."""


@contextmanager
def application(part: str, direct: bool) -> Iterator[Server]:
    config = shipped_config()
    app = config["applications"][0]
    app["import_path"] = "free_engine:build"
    app["args"]["encoders"] = []
    app["args"]["direct_calls"] = direct
    app["deployments"] = [d for d in app["deployments"] if d["name"] != "Embedder"]
    path = os.pathsep.join([str(HERE), str(ROOT)])
    env = {**haproxy_env(), SOURCE: PARTS[part], "PYTHONPATH": path}
    process = ServeProcess(config, env)
    try:
        process.wait_until_ready()
        yield Server(process.url, process.processes)
    finally:
        for stopped in process.processes():
            stopped.resume()
        process.stop()


async def stream_all(url: str, streams: int, tokens: int) -> float:
    """Seconds until all of so many streams have got all of their tokens."""
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def one(client: aiohttp.ClientSession) -> None:
        async with client.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            text = await answer.read()
        assert text.endswith(b"data: [DONE]\n\n"), text[-200:]

    timeout = aiohttp.ClientTimeout(LIMIT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(streams)))
        return time.perf_counter() - start


def cpu_s(server: Server, name: str) -> float:
    """CPU-seconds of the processes whose command line has `name`."""
    return sum(
        sum(process.cpu_times()[:2])
        for process in server.processes()
        if name in " ".join(process.cmdline())
    )


def turn(server: Server, part: str, args: argparse.Namespace) -> tuple[float, float]:
    """Tokens per second, and CPU-microseconds of the part's process for a token."""
    with on_turn(server):
        asyncio.run(stream_all(server.url, 4, 4))
        before = cpu_s(server, PROCESSES[part])
        took = asyncio.run(stream_all(server.url, args.streams, args.tokens))
        cpu = cpu_s(server, PROCESSES[part]) - before
    total = args.streams * args.tokens
    return total / took, 1e6 * cpu / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(card()))
    print("| part | calls | tokens/s (range) | its CPU for a token, us |\n|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        with ExitStack() as stack:
            servers = {}
            for calls, direct in (("through Serve", False), ("direct", True)):
                servers[calls] = stack.enter_context(application(part, direct))
                time.sleep(SETTLE_S)
                servers[calls].pause()
            found: dict[str, list[tuple[float, float]]] = {calls: [] for calls in servers}
            for number in range(args.turns + 1):
                for calls, server in servers.items():
                    result = turn(server, part, args)
                    if number:  # the first turn warms up
                        found[calls].append(result)
        for calls, results in found.items():
            rates = [rate for rate, _ in results]
            cpu_us = statistics.median(cpu for _, cpu in results)
            rate = statistics.median(rates)
            rows.append({"part": part, "calls": calls, "tokens_per_s": rates, "cpu_us": cpu_us})
            print(
                f"| {part} | {calls} | {rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) |"
                f" {cpu_us:.0f} |",
                flush=True,
            )
    print(json.dumps({"benchmark": "ceiling", "card": card(), **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
