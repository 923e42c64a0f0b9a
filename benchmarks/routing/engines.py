"""Routing policies on real engines: prefix hits and balance, by the engines' own counts.

    python -m benchmarks.routing.engines [--replicas 4] [--prefixes 64] [--requests 512]

One application with several replicas of the embedded model; each policy gets the same number of
guided requests, in the same order, with prefixes of its own (so that none finds another's cache),
all against one negative prompt. KV pools are small, so that a replica holds about a quarter of the
prefixes. `round robin` and `power of two choices` rank by turns and by streams; `ours` is
GroupRouter. simulation.py asks the same of a simulation, with more policies.

Hits are tokens found in the prefix cache of all tokens asked for, both streams; max/mean is of
requests per replica. Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tools.serving.cluster import Cluster
from tools.serving.process import free_port

from .. import ROOT
from ..report import Report, parser
from ..serving.servers import without_encoders
from .policies import POLICIES, POLICY_FILE

NEGATIVE = "A story about nothing that anybody would want to hear a second time."
BLOCK_SIZE, BLOCKS = 32, 256
"""KV tokens of a replica: 8192."""

WORDS = (
    "boat tree moon girl dog river bread stone apple bird king lamp road snow ship garden bell"
    " mouse hill"
)


def config(replicas: int) -> dict[str, Any]:
    result, application = without_encoders()
    application["args"]["engine"] |= {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 16,
    }
    replica = application["deployments"][1]
    replica["num_replicas"] = replicas
    replica["ray_actor_options"]["num_cpus"] = 0.2
    replica["request_router_config"] = {
        "request_router_class": "benchmarks.routing.policies:SwitchRouter",
        "request_routing_stats_period_s": 0.5,
    }
    return result


def workload(policy: str, args: argparse.Namespace) -> Iterator[str]:
    """Prompts: a prefix of some 300 tokens that others share, and a question of its own."""
    rng = random.Random(1)
    prefixes = [
        f"{policy} {i}: " + " ".join(rng.choices(WORDS.split(), k=args.words))
        for i in range(args.prefixes)
    ]
    for i in range(args.requests):
        yield f"{rng.choice(prefixes)} Question {i}."


async def send(url: str, prompts: Iterator[str], clients: int) -> list[float]:
    """Seconds to the first chunk of each request."""
    taken: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def ask() -> None:
            for prompt in prompts:
                body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
                body |= {"guidance_scale": 2.0, "negative_prompt": NEGATIVE}
                start, first = time.perf_counter(), None
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    async for _ in answer.aiter_bytes():
                        first = first or time.perf_counter() - start
                taken.append(first or 0.0)

        await asyncio.gather(*(ask() for _ in range(clients)))
    return taken


def counts(metrics_port: int) -> dict[str, dict[str, float]]:
    """Of each engine, by Serve's replica id: tokens looked up, tokens found, requests."""
    time.sleep(12)  # Ray passes metrics on every ten seconds or so
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30).text
    found: dict[str, dict[str, float]] = {}
    for name in ("prefix_cache_queries", "prefix_cache_hits", "request_success"):
        for labels, value in re.findall(
            rf"^ray_vllm_{name}(?:_total)?{{(.*?)}} (\S+)$", text, re.MULTILINE
        ):
            replica = re.search(r'ReplicaId="(\w+)"', labels)
            if replica:
                of_replica = found.setdefault(replica[1], {})
                of_replica[name] = of_replica.get(name, 0.0) + float(value)
    return found


@contextmanager
def application(args: argparse.Namespace) -> Iterator[tuple[str, int, Path]]:
    port = free_port()
    with ExitStack() as stack:
        policy_file = Path(stack.enter_context(TemporaryDirectory())) / "policy"
        policy_file.write_text("ours")
        env = {POLICY_FILE: str(policy_file), "PYTHONPATH": str(ROOT)}
        cluster = stack.enter_context(
            Cluster(env=env, head_options=[f"--metrics-export-port={port}"])
        )
        cluster.add(spare=1)
        server = stack.enter_context(cluster.serve(config(args.replicas), **env))
        deadline = time.monotonic() + 600
        while len(cluster.find("EngineCore")) < args.replicas and time.monotonic() < deadline:
            time.sleep(1)
        while server.replicas() < args.replicas and time.monotonic() < deadline:
            time.sleep(1)
        yield server.url, port, policy_file


def row(
    policy: str, grown: dict[str, dict[str, float]], taken: list[float], seconds: float
) -> dict[str, Any]:
    requests = [values.get("request_success", 0.0) for values in grown.values()]
    looked_up = sum(values.get("prefix_cache_queries", 0.0) for values in grown.values())
    return {
        "policy": policy,
        "hits": sum(values.get("prefix_cache_hits", 0.0) for values in grown.values()) / looked_up,
        "max_mean": max(requests) / (sum(requests) / len(requests)),
        "p50_s": sorted(taken)[len(taken) // 2],
        "requests_per_s": len(taken) / seconds,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--replicas", type=int, default=4)
    options.add_argument("--prefixes", type=int, default=64)
    options.add_argument("--requests", type=int, default=512, help="for each policy")
    options.add_argument("--words", type=int, default=150, help="of a prefix")
    options.add_argument("--clients", type=int, default=8)
    args = options.parse_args()
    report, rows = Report("routing engines", args), []
    with application(args) as (url, metrics_port, policy_file):
        report.head(
            *("policy", "prefix hits", "max/mean requests", "first chunk, p50 s", "requests/s")
        )
        before = counts(metrics_port)
        for policy in POLICIES:
            policy_file.write_text(policy)
            start = time.perf_counter()
            taken = asyncio.run(send(url, workload(policy, args), args.clients))
            seconds = time.perf_counter() - start
            after = counts(metrics_port)
            grown = {
                replica: {
                    n: value - before.get(replica, {}).get(n, 0.0) for n, value in own.items()
                }
                for replica, own in after.items()
            }
            before = after
            rows.append(found := row(policy, grown, taken, seconds))
            shares = (f"{found['hits']:.3f}", f"{found['max_mean']:.2f}")
            report.row(policy, *shares, f"{found['p50_s']:.2f}", f"{found['requests_per_s']:.1f}")
    report.end(rows=rows)


if __name__ == "__main__":
    main()
