"""How many tokens a second one ingress and one replica can stream, if the engine costs nothing.

    python -m benchmarks.serving.ceiling [--streams 32] [--tokens 400] [--turns 3]

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
import statistics
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import aiohttp

from .. import ROOT
from ..report import Report, parser
from .free_engine import SOURCE
from .servers import Server, application, without_encoders

PARTS = {"ingress": "replica", "replica": "core"}
"""What is measured, and what must be free for it."""
PROCESSES = {"ingress": "CfgRouter", "replica": "ModelReplica"}
LIMIT_S = 300
SETTLE_S = 30
"""After the start: the replica's helper for grammars imports vLLM."""


def with_free(part: str, direct: bool) -> AbstractContextManager[Server]:
    """The application, in which what the part does not need is free."""
    config, app = without_encoders()
    app["import_path"] = "benchmarks.serving.free_engine:build"
    app["args"]["direct_calls"] = direct
    return application(config, haproxy=True, env={SOURCE: PARTS[part], "PYTHONPATH": str(ROOT)})


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
    with server.on_turn():
        asyncio.run(stream_all(server.url, 4, 4))
        before = cpu_s(server, PROCESSES[part])
        took = asyncio.run(stream_all(server.url, args.streams, args.tokens))
        cpu = cpu_s(server, PROCESSES[part]) - before
    total = args.streams * args.tokens
    return total / took, 1e6 * cpu / total


def turns(part: str, args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """What `turn` returns, of each way of calling."""
    with ExitStack() as stack:
        servers = {}
        for calls, direct in (("through Serve", False), ("direct", True)):
            servers[calls] = stack.enter_context(with_free(part, direct))
            time.sleep(SETTLE_S)
            servers[calls].pause()
        found: dict[str, list[tuple[float, float]]] = {calls: [] for calls in servers}
        for _ in range(args.turns + 1):
            for calls, server in servers.items():
                found[calls].append(turn(server, part, args))
        return {calls: results[1:] for calls, results in found.items()}  # the first one warms up


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--tokens", type=int, default=400)
    options.add_argument("--turns", type=int, default=3)
    args = options.parse_args()
    report = Report("ceiling", args)
    report.head("part", "calls", "tokens/s (range)", "its CPU for a token, us")
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        for calls, results in turns(part, args).items():
            rates = [rate for rate, _ in results]
            cpu_us = statistics.median(cpu for _, cpu in results)
            rows.append({"part": part, "calls": calls, "tokens_per_s": rates, "cpu_us": cpu_us})
            told = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
            report.row(part, calls, told, f"{cpu_us:.0f}")
    report.end(rows=rows)


if __name__ == "__main__":
    main()
