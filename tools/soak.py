"""Run mixed traffic for half an hour on the shipped configs/stories.yaml.

    python -m tools.soak [--minutes 30] [--clients 8] [--json FILE]

It prints latencies, errors by class, memory and KV blocks.

Clients with pauses send guided and plain requests whose right answers are known (load.py). They
also embed texts whose vectors are known, leave streams in the middle, and send requests that must
be refused. Every answer is judged. Memory is that of all the server's processes, with shared pages
counted once (PSS). "start" is its value after a tenth of the time, when allocators and caches have
reached their size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tools.serving.load import Load, Outcome
from tools.serving.process import ServeProcess, shipped_config
from tools.serving.questions import QUESTIONS

SHARES = {"guided": 35, "plain": 25, "embeddings": 20, "left": 10, "malformed": 10}
MEAN_PAUSE_S = 0.5
SAMPLE_EVERY_S = 30.0
TEXTS = [
    f"The {animal} went to the {place}."
    for animal in ("dog", "girl", "king")
    for place in ("sea", "hill")
]
SAME_VECTOR = 1e-5
"""Largest difference of a component: float32, computed in a batch with other texts."""

COMPLETIONS = "/v1/completions"
MALFORMED: tuple[tuple[str, Any, int], ...] = (
    (COMPLETIONS, b"{not json", 400),
    (COMPLETIONS, [], 400),
    (COMPLETIONS, {"prompt": "x", "guidance_scal": 2}, 400),
    (COMPLETIONS, {"prompt": "x", "guidance_scale": 2, "negative_prompt_token_ids": []}, 400),
    (COMPLETIONS, {"prompt": "word " * 2000, "guidance_scale": 2}, 400),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 400),
    (COMPLETIONS, {"prompt": "x", "model": "no-such"}, 404),
    ("/v1/embeddings", {"model": "all-MiniLM-L6-v2", "input": [None]}, 400),
    ("/v1/no-such", {}, 404),
)


@dataclass
class Soak:
    """One run.

    outcomes: results of the questions.
    told: how many requests of each class had each result.
    """

    url: str
    load: Load
    outcomes: list[Outcome] = field(default_factory=list)
    told: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    vectors: list[list[float]] = field(default_factory=list)
    embedding_s: list[float] = field(default_factory=list)

    async def learn(self) -> None:
        """Request the right answers, one by one."""
        await self.load.learn()
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            self.vectors = [(await embed(client, [text]))[0] for text in TEXTS]

    async def run(self, clients: int, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            await asyncio.gather(
                *(self._client(client, random.Random(seed), until) for seed in range(clients))
            )

    async def _client(self, client: httpx.AsyncClient, rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
            try:
                became = await getattr(self, f"_{kind}")(client, rng)
            except httpx.HTTPError as error:
                became = type(error).__name__
            self.told[kind][became] += 1
            await asyncio.sleep(rng.expovariate(1 / MEAN_PAUSE_S))

    async def _guided(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        return await self._question(client, rng, guided=True)

    async def _plain(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        return await self._question(client, rng, guided=False)

    async def _question(self, client: httpx.AsyncClient, rng: random.Random, guided: bool) -> str:
        question = rng.choice([question for question in QUESTIONS if question.guided == guided])
        outcome = await self.load.ask(client, question, stream=rng.random() < 0.8)
        self.outcomes.append(outcome)
        return outcome.kind

    async def _embeddings(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        chosen = rng.sample(range(len(TEXTS)), rng.randint(1, len(TEXTS)))
        start = time.monotonic()
        rows = await embed(client, [TEXTS[i] for i in chosen])
        self.embedding_s.append(time.monotonic() - start)
        off = max(
            abs(a - b)
            for row, i in zip(rows, chosen, strict=True)
            for a, b in zip(row, self.vectors[i], strict=True)
        )
        return "right" if off < SAME_VECTOR else "wrong"

    async def _left(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        body = rng.choice(QUESTIONS).body(stream=True) | {"max_tokens": 400}
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(rng.uniform(0, 0.6)),
                client.stream("POST", COMPLETIONS, json=body) as answer,
            ):
                async for _ in answer.aiter_bytes():
                    pass
            return "ended"
        return "left"

    async def _malformed(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        path, body, status = rng.choice(MALFORMED)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        return (
            f"{answer.status_code}, as it should be"
            if answer.status_code == status
            else str(answer.status_code)
        )


async def embed(client: httpx.AsyncClient, texts: list[str]) -> list[list[float]]:
    answer = await client.post("/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": texts})
    return [row["embedding"] for row in answer.raise_for_status().json()["data"]]


async def watch(server: ServeProcess, samples: list[tuple[float, float]]) -> None:
    """Append (seconds, MiB) to `samples` until it is cancelled."""
    start = time.monotonic()
    while True:
        size = await asyncio.to_thread(server.memory_bytes)
        samples.append((time.monotonic() - start, size / 2**20))
        await asyncio.sleep(SAMPLE_EVERY_S)


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    return (
        f"{1000 * ordered[len(ordered) // 2]:.0f}, {1000 * ordered[int(0.99 * len(ordered))]:.0f}"
    )


def latency_lines(soak: Soak) -> list[str]:
    """Return the table of latencies: p50 and p99, in milliseconds.

    For streamed answers that were right, it has the time to the first token and the time per token
    after that.
    """
    lines = [
        "| class | requests | first token, ms: p50, p99 | per token, ms: p50, p99 |",
        "|---" * 4 + "|",
    ]
    for guided in (True, False):
        seen = [
            o
            for o in soak.outcomes
            if o.question.guided == guided and o.stream and o.kind == "right"
        ]
        timed = [(o, o.first) for o in seen if o.first is not None]
        first = percentiles([at - o.started for o, at in timed])
        rest = percentiles([(o.ended - at) / (o.question.tokens - 1) for o, at in timed])
        lines.append(
            f"| {'guided' if guided else 'plain'}, streamed | {len(seen)} | {first} | {rest} |"
        )
    lines.append(
        f"| embeddings | {len(soak.embedding_s)} | {percentiles(soak.embedding_s)} (whole) | - |"
    )
    return lines


async def idle_state(url: str) -> dict[str, int]:
    """Wait until the engine is idle. Return its state as /ready reports it."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(60):
            answer = (await client.get("/ready")).raise_for_status()
            state: dict[str, int] = answer.json()["engine"]
            if state["running"] == state["waiting"] == state["groups"] == 0:
                break
            await asyncio.sleep(0.5)
    return state


async def measure(server: ServeProcess, clients: int, minutes: float) -> dict[str, Any]:
    soak = Soak(server.url, Load(server.url, clients))
    samples: list[tuple[float, float]] = []
    await soak.learn()
    before = await idle_state(server.url)
    watching = asyncio.ensure_future(watch(server, samples))
    await soak.run(clients, time.monotonic() + 60 * minutes)
    watching.cancel()
    after = await idle_state(server.url)
    print("\n".join(latency_lines(soak)))
    print("\n| class | requests | what became of them |\n|---|---|---|")
    for kind in SHARES:
        told = ", ".join(f"{count} {became}" for became, count in soak.told[kind].most_common())
        print(f"| {kind} | {soak.told[kind].total()} | {told} |")
    warm = [size for at, size in samples if at > 6 * minutes] or [samples[-1][1]]
    half = len(warm) // 2
    blocks = {
        name: (before[name], after[name])
        for name in ("running", "groups", "free_blocks", "total_blocks")
    }
    memory = {"start": warm[0], "middle": warm[half], "end": warm[-1], "most": max(warm)}
    print(f"\nmemory, MiB: { ({name: round(size) for name, size in memory.items()}) }")
    print(f"engine, before and after: {blocks}")
    return {"told": soak.told, "memory_mib": memory, "samples": samples, "engine": blocks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ServeProcess(shipped_config()) as server:
        result = asyncio.run(measure(server, args.clients, args.minutes))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
