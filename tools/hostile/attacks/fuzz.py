"""Fuzz all routes with requests that are nearly valid, and check the answers.

    python -m tools.hostile --fuzz 10000 [--seed N]

The requests are reproducible from the seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.hostile.attacks.fields import DAMAGE, HEADERS, LONG, METHODS, RAW, READ, ROUTES, VALID
from tools.hostile.attempt import (
    REQUEST_LIMIT_S,
    Attempt,
    Reply,
    attack,
    in_error_shape,
    is_failure,
)

CLIENTS = 6
SHOWN = 400
"""Number of bytes of a body that are printed."""

GENERATION = ("/v1/completions", "/v1/chat/completions")
"""Routes with the most fields. They are chosen more often."""

OVERLOADED = ("503", "504")


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One request.

    number: its index in the sequence of its seed.
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None

    def __str__(self) -> str:
        body = self.body or b""
        shown = body[:SHOWN] + (b"... %d bytes" % len(body) if len(body) > SHOWN else b"")
        headers = {name: value[:40] for name, value in self.headers.items()}
        return f"shot {self.number}: {self.method} {self.path[:80]} {headers or ''} {shown!r}"


def shots(count: int, seed: int) -> Iterator[Shot]:
    """Yield `count` requests. Each depends only on the seed and on its own number."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        yield read_shot(rng, number) if rng.random() < 0.04 else body_shot(rng, number)


def read_shot(rng: random.Random, number: int) -> Shot:
    method = rng.choice(("GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
    path = rng.choice(READ) + rng.choice(
        ("", "", "?x=1", "?" + "a" * 5000, "/", "/../ready", "/%00", "/%ff%fe")
    )
    return Shot(number=number, method=method, path=path, headers=rng.choice(HEADERS), body=None)


def body_shot(rng: random.Random, number: int) -> Shot:
    path = rng.choice([*ROUTES, *GENERATION * 4])
    start, names = ROUTES[path]
    fields: list[tuple[str, bytes]] = [(name, encoded(value)) for name, value in start.items()]
    if rng.random() < 0.25 and "completions" in path:
        fields.append(("guidance_scale", encoded(rng.choice([2, 1.5, 0, -1]))))
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 1, 2, 4]))):
        fields = [field for field in fields if field[0] != name or rng.random() < 0.05]
        fields.append((name, odd_value(rng)))
    body = b"{" + b",".join(encoded(name) + b":" + value for name, value in fields) + b"}"
    return Shot(
        number=number,
        method=rng.choice(METHODS),
        path=path,
        headers=rng.choice(HEADERS),
        body=damaged(rng, body),
    )


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def odd_value(rng: random.Random) -> bytes:
    """Return a value of another field, an odd value, or such a value inside a list or object."""
    if rng.random() < 0.1:
        return rng.choice(RAW)
    if rng.random() < 0.06:
        return long_value(rng)
    value = rng.choice(VALID)
    wrapped = rng.choice(
        [value] * 8 + [[value], {"a": value}, [value, rng.choice(VALID)], {"text": value}]
    )
    return encoded(wrapped)


def long_value(rng: random.Random) -> bytes:
    """Return a long list, an object with many names, or such a list inside of other values."""
    entry, number = rng.choice(LONG)
    entries = [entry] * max(1, int(number * rng.choice([0.02, 0.3, 1, 1, 4])))
    if rng.random() < 0.2:
        entries[rng.randrange(len(entries))] = rng.choice([b"null", b'"x"', b"{}", b"-1"])
    if rng.random() < 0.15:
        named = (b'"%d":%s' % (name, value) for name, value in enumerate(entries))
        return b"{" + b",".join(named) + b"}"
    listed = b"[" + b",".join(entries) + b"]"
    wrapped = (b"%s", b"%s", b"%s", b"[%s]", b'{"x":%s}', b'[{"role":"user","content":%s}]')
    return rng.choice(wrapped) % listed


def damaged(rng: random.Random, text: bytes) -> bytes:
    for _ in range(rng.choice([0] * 8 + [1, 3])):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(DAMAGE) + text[at + rng.choice([0, 1]) :]
    return text


def complaint(shot: Shot, reply: Reply) -> str | None:
    """Return what is wrong with an answer. None: nothing.

    503 and 504 in the right shape are not wrong.
    """
    if reply.kind in OVERLOADED and in_error_shape(reply.text):
        return None
    if not reply.status or reply.status >= 500 or is_failure(reply.kind):
        return f"{reply.kind}: {reply.text[:120]!r}"
    if reply.status >= 400 and shot.method != "HEAD" and not in_error_shape(reply.text):
        return f"{reply.status} is not in OpenAI's shape: {reply.text[:120]!r}"
    return None


async def fuzz(attempt: Attempt, count: int, seed: int) -> None:
    """Send `count` requests from a few concurrent clients, and print each that fails.

    `python -m tools.hostile --seed SEED --shot NUMBER` sends one of them again.
    """
    sequence = shots(count, seed)

    async def client(_: int) -> None:
        for shot in sequence:
            reply = await send(attempt, shot)
            attempt.told[reply.kind] += 1
            if wrong := complaint(shot, reply):
                attempt.fault(f"{shot.path}: {reply.kind}")
                print(f"  seed {seed}, {shot}\n    {wrong}", flush=True)

    await attempt.together(CLIENTS, client)


async def send(attempt: Attempt, shot: Shot) -> Reply:
    return await attempt.send(
        shot.path,
        shot.body,
        method=shot.method,
        headers=shot.headers,
        limit_s=REQUEST_LIMIT_S,
        count=False,
    )


BOUNDED_COUNT = 400


@attack(0, bounded=True)
async def fuzzed(attempt: Attempt) -> None:
    """Send 400 requests with wrong types, huge values, long lists and damaged JSON to all routes.

    None may get a 500. Each error must have the shape of OpenAI's errors.
    """
    await fuzz(attempt, BOUNDED_COUNT, seed=17)
