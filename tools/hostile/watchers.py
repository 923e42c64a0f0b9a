"""Clients that know the right answers to their requests, in a process of their own.

The load of the attackers' process does not slow them down.

`python -m tools.hostile.watchers URL HEADERS [sees]` reads commands from stdin, one per line,
and answers each with a line of JSON. HEADERS are JSON too. With `sees`, one client asks about
images. The commands are `learn`, `go`, `pause` and `collect`. `collect` returns the result of each
request since the last `collect`, including requests that still wait.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from tools.serving.load import Load
from tools.serving.questions import QUESTIONS

TEXTS = [
    f"The {animal} went to the {place}."
    for animal in ("dog", "girl", "king")
    for place in ("sea", "hill")
]
SAME_VECTOR = 1e-5
"""Largest difference of a component: float32, computed in a batch with other texts."""

PAUSE_S, READY_EVERY_S = 0.3, 0.5
LIMIT_S = 60.0
WAITING = "waiting"


@dataclass(frozen=True)
class Seen:
    """The result of one request of a watcher.

    name: class of the request.
    kind: right, wrong, lost, waiting, or the error that the watcher got.

    Times are those of time.monotonic(), which all processes of a machine share.
    """

    name: str
    started: float
    ended: float
    kind: str


@dataclass
class Watchers:
    """The clients.

    running: set while they send requests.
    seen: results since the last `collect`.
    open: class and start of each request that still waits.
    """

    url: str
    headers: dict[str, str]
    load: Load
    running: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Seen] = field(default_factory=list)
    open: dict[int, tuple[str, float]] = field(default_factory=dict)
    vectors: list[list[float]] = field(default_factory=list)
    sees: bool = False
    descriptions: list[str] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def client(self) -> httpx.AsyncClient:
        """Return a client that opens a new connection for each request."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=LIMIT_S, limits=limits
        )

    async def learn(self) -> None:
        """Request the right answers, one by one."""
        async with self.client() as client:
            await self.load.learn_with(client)
            self.vectors = [
                (await embed(client, [text])).json()["data"][0]["embedding"] for text in TEXTS
            ]
            for image in IMAGES if self.sees else ():
                answer = await describe(client, image)
                self.descriptions.append(told(answer.raise_for_status()))

    async def watch(self) -> None:
        async with self.client() as client:
            loops = [self.repeat(client, self.question, PAUSE_S) for _ in range(2)]
            loops += [
                self.repeat(client, self.embedding, PAUSE_S),
                self.repeat(client, self.structured, PAUSE_S),
            ]
            if self.sees:
                loops.append(self.repeat(client, self.image, PAUSE_S))
            await asyncio.gather(*loops, self.repeat(client, self.ready, READY_EVERY_S))

    async def repeat(
        self,
        client: httpx.AsyncClient,
        ask: Callable[[httpx.AsyncClient], tuple[str, Awaitable[str]]],
        pause_s: float,
    ) -> None:
        while True:
            await self.running.wait()
            name, answer = ask(client)
            number, started = next(self.numbers), time.monotonic()
            self.open[number] = (name, started)
            try:
                kind = await answer
            except httpx.TimeoutException:
                kind = f"no answer in {LIMIT_S:.0f} s"
            except httpx.HTTPError as error:
                kind = type(error).__name__
            del self.open[number]
            self.seen.append(Seen(name, started, time.monotonic(), kind))
            await asyncio.sleep(pause_s)

    def question(self, client: httpx.AsyncClient) -> tuple[str, Awaitable[str]]:
        question = self.rng.choice(QUESTIONS)
        name = f"{'guided' if question.guided else 'plain'} {question.tokens}"
        return name, self._question(client, question)

    async def _question(self, client: httpx.AsyncClient, question: Any) -> str:
        outcome = await self.load.ask(client, question, stream=self.rng.random() < 0.7)
        return (
            f"{outcome.kind}: {outcome.detail}" if outcome.kind == "error event" else outcome.kind
        )

    def embedding(self, client: httpx.AsyncClient) -> tuple[str, Awaitable[str]]:
        return "embedding", self._embedding(client, self.rng.randrange(len(TEXTS)))

    async def _embedding(self, client: httpx.AsyncClient, at: int) -> str:
        answer = await embed(client, [TEXTS[at]])
        if answer.status_code != 200:
            return str(answer.status_code)
        vector = answer.json()["data"][0]["embedding"]
        off = max(abs(a - b) for a, b in zip(vector, self.vectors[at], strict=True))
        return "right" if off < SAME_VECTOR else "wrong"

    def image(self, client: httpx.AsyncClient) -> tuple[str, Awaitable[str]]:
        return "image", self._image(client, self.rng.randrange(len(IMAGES)))

    async def _image(self, client: httpx.AsyncClient, at: int) -> str:
        answer = await describe(client, IMAGES[at])
        if answer.status_code != 200:
            return str(answer.status_code)
        return "right" if told(answer) == self.descriptions[at] else "wrong"

    def structured(self, client: httpx.AsyncClient) -> tuple[str, Awaitable[str]]:
        """Ask with a new grammar, which only one text matches.

        The grammar has to be compiled each time, because it is not in a cache.
        """
        return "grammar", self._structured(client, f"w{self.rng.randrange(10**9)}")

    async def _structured(self, client: httpx.AsyncClient, word: str) -> str:
        body = {
            "prompt": "Once",
            "max_tokens": 40,
            "structured_outputs": {"choice": [word]},
            "temperature": 0,
        }
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return str(answer.status_code)
        return "right" if answer.json()["choices"][0]["text"] == word else "wrong"

    def ready(self, client: httpx.AsyncClient) -> tuple[str, Awaitable[str]]:
        return "/ready", self._ready(client)

    async def _ready(self, client: httpx.AsyncClient) -> str:
        answer = await client.get("/ready")
        return "right" if answer.status_code == 200 else str(answer.status_code)

    async def finished(self) -> None:
        """Return when no request waits any more, or after LIMIT_S."""
        for _ in range(round(LIMIT_S / 0.05)):
            if not self.open:
                break
            await asyncio.sleep(0.05)

    def collect(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        waiting = [Seen(name, started, now, WAITING) for name, started in self.open.values()]
        seen, self.seen = [asdict(seen) for seen in [*self.seen, *waiting]], []
        return seen


async def embed(client: httpx.AsyncClient, texts: list[str]) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": texts})


def bitmap(seed: int) -> str:
    """Return the `data:` address of a BMP of 28 x 28 random pixels."""
    pixels = random.Random(seed).randbytes(28 * 28 * 3)
    head = struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54)
    head += struct.pack("<IiiHHIIiiII", 40, 28, 28, 1, 24, 0, len(pixels), 0, 0, 0, 0)
    return f"data:image/bmp;base64,{base64.b64encode(b'BM' + head + pixels).decode()}"


IMAGES = [bitmap(seed) for seed in range(4)]


async def describe(client: httpx.AsyncClient, image: str) -> httpx.Response:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    return await client.post("/v1/chat/completions", json={**body, "ignore_eos": True})


def told(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


async def obey(watchers: Watchers, command: str) -> Any:
    if command == "learn":
        await watchers.learn()
    elif command == "go":
        watchers.running.set()
    elif command == "pause":
        watchers.running.clear()
        await watchers.finished()
    elif command == "collect":
        return watchers.collect()
    return "done"


async def main(url: str, headers: dict[str, str], sees: bool) -> None:
    watchers = Watchers(url, headers, Load(url, 0), sees=sees)
    watching = asyncio.ensure_future(watchers.watch())
    while line := await asyncio.to_thread(sys.stdin.readline):
        result: Any
        try:
            result = await obey(watchers, line.strip())
        except Exception as error:  # reported to the process that sent the command
            result = {"error": repr(error)}
        print(json.dumps(result), flush=True)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), "sees" in sys.argv[3:]))
