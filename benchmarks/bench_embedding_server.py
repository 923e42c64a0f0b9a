"""The embedding server over real HTTP: what a second replica brings, what HTTP costs, and two
minutes of disorder.

    python benchmarks/bench_embedding_server.py [--minutes 2]

Starts two servers, with one and with two Embedder replicas of one thread each, and sends them the
same work in turns. On a machine with as many cores as replicas the client, the proxy and the router
need a part of those cores, so the ratio stays below two. Prints a card, a table, and one line of
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench_embeddings import minilm, workloads  # noqa: E402
from card import card  # noqa: E402

from cfg_core.prefill_only import AsyncEngine, Engine, EngineOptions, RequestOptions  # noqa: E402
from tools.serving.process import ServeProcess, shipped_config  # noqa: E402

NAME = "all-MiniLM-L6-v2"


def config(num_replicas: int) -> dict[str, Any]:
    """configs/stories.yaml without the generator."""
    result = shipped_config()
    application = result["applications"][0]
    application["args"] = {"encoders": application["args"]["encoders"]}
    application["deployments"] = [
        d for d in application["deployments"] if d["name"] != "ModelReplica"
    ]
    for deployment in application["deployments"]:
        if deployment["name"] == "Embedder":
            deployment["num_replicas"] = num_replicas
    return result


async def embed(client: httpx.AsyncClient, texts: list[str]) -> list[list[float]]:
    answer = await client.post("/v1/embeddings", json={"model": NAME, "input": texts})
    answer.raise_for_status()
    return [row["embedding"] for row in answer.json()["data"]]


# ---- replicas ------------------------------------------------------------------------------------


async def texts_per_s(
    url: str, texts: list[str], num_clients: int = 8, per_request: int = 32
) -> float:
    requests = iter([texts[i : i + per_request] for i in range(0, len(texts), per_request)])
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def work() -> None:
            for request in requests:
                await embed(client, request)

        await asyncio.gather(*(work() for _ in range(num_clients)))
    return len(texts) / (time.perf_counter() - start)


async def replicas(urls: dict[str, str], texts: list[str], rounds: int = 4) -> dict[str, float]:
    """Texts per second of each server: the best of `rounds` turns after one to warm up."""
    best = dict.fromkeys(urls, 0.0)
    for turn in range(rounds + 1):
        for name, url in urls.items():
            speed = await texts_per_s(url, texts)
            best[name] = max(best[name], speed) if turn else 0.0
    return best


# ---- the cost of HTTP ----------------------------------------------------------------------------


async def median_ms(call: Any, num: int) -> float:
    times = []
    for _ in range(num):
        start = time.perf_counter()
        await call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


async def http_cost(url: str, text: str, num: int = 300) -> dict[str, float]:
    """Milliseconds of one request with one short text, one at a time: through HTTP, and in the
    engine alone."""
    engine = AsyncEngine.load(str(minilm()), EngineOptions(num_threads=1))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await median_ms(lambda: embed(client, [text]), 20)
        over_http = await median_ms(lambda: embed(client, [text]), num)
    alone = await median_ms(lambda: engine.run([text], RequestOptions()), num)
    engine.close()
    return {"http_ms": over_http, "engine_ms": alone}


# ---- disorder ------------------------------------------------------------------------------------


class Disorder:
    """64 clients that send good texts, texts that are too long, nonsense, and leave at random."""

    def __init__(self, url: str, texts: list[str], seconds: float) -> None:
        self._url, self._texts, self._end = url, texts, time.monotonic() + seconds
        with Engine.load(str(minilm()), num_threads=1) as engine:
            self._expected = dict(zip(texts, engine.embed(texts, show_progress=False), strict=True))
        self._random = random.Random(3)
        self.counts: dict[str, int] = {}
        self.largest_error = 0.0

    async def run(self) -> None:
        async with httpx.AsyncClient(
            base_url=self._url, timeout=60, limits=httpx.Limits(max_connections=200)
        ) as client:
            await asyncio.gather(*(self._client(client) for _ in range(64)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self._end:
            kind = self._random.choice(["good"] * 6 + ["leaves"] * 2 + ["long", "broken"])
            try:
                outcome = await getattr(self, f"_{kind}")(client)
            except (httpx.HTTPError, TimeoutError) as error:
                outcome = f"{kind}: {type(error).__name__}"
            self.counts[outcome] = self.counts.get(outcome, 0) + 1

    async def _good(self, client: httpx.AsyncClient) -> str:
        texts = self._random.choices(self._texts, k=self._random.randint(1, 6))
        answer = await client.post("/v1/embeddings", json={"model": NAME, "input": texts})
        if answer.status_code == 200:
            for text, row in zip(texts, answer.json()["data"], strict=True):
                self.largest_error = max(
                    self.largest_error, np.abs(self._expected[text] - row["embedding"]).max()
                )
        return f"good: {answer.status_code}"

    async def _leaves(self, client: httpx.AsyncClient) -> str:
        request = client.post("/v1/embeddings", json={"model": NAME, "input": self._texts[:20]})
        try:
            await asyncio.wait_for(request, self._random.random() * 0.05)
        except TimeoutError:
            return "left"
        return "left too late"

    async def _long(self, client: httpx.AsyncClient) -> str:
        answer = await client.post("/v1/embeddings", json={"model": NAME, "input": "word " * 5000})
        return f"too long: {answer.status_code}"

    async def _broken(self, client: httpx.AsyncClient) -> str:
        bodies = [
            b"{",
            b'{"input": 5}',
            b'{"input": [[99999999]]}',
            b'{"input": ["a", 1]}',
            b"[]",
            b'{"input": ""}',
        ]
        answer = await client.post(
            "/v1/embeddings",
            content=self._random.choice(bodies),
            headers={"Content-Type": "application/json"},
        )
        return f"broken: {answer.status_code}"


def disorder(server: ServeProcess, texts: list[str], minutes: float) -> dict[str, Any]:
    """Counts by outcome, the largest error of a good answer, and memory after a first tenth and at
    the end."""
    asyncio.run(Disorder(server.url, texts, 6 * minutes).run())
    before = server.memory_bytes()
    chaos = Disorder(server.url, texts, 60 * minutes)
    asyncio.run(chaos.run())
    time.sleep(2)
    state = httpx.get(f"{server.url}/ready", timeout=10).json()["encoders"][NAME]
    return {
        "counts": dict(sorted(chaos.counts.items())),
        "largest_error": float(chaos.largest_error),
        "memory_mib": [round(before / 2**20), round(server.memory_bytes() / 2**20)],
        "left_in_the_engine": state,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="of disorder")
    args = parser.parse_args()
    texts = workloads(minilm(), 1.0)
    servers = {"1 replica": ServeProcess(config(1)), "2 replicas": ServeProcess(config(2))}
    try:
        for server in servers.values():
            server.wait_until_ready()
        urls = {name: server.url for name, server in servers.items()}
        speeds = asyncio.run(replicas(urls, texts["mixed"]))
        result: dict[str, Any] = {
            "card": card(),
            "texts_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
            "ratio": round(speeds["2 replicas"] / speeds["1 replica"], 2),
            **{
                key: round(value, 2)
                for key, value in asyncio.run(
                    http_cost(urls["1 replica"], texts["short"][0])
                ).items()
            },
            "disorder": disorder(servers["2 replicas"], texts["short"][:200], args.minutes),
        }
    finally:
        for server in servers.values():
            server.stop()
    for key, value in result.items():
        print(f"{key}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
