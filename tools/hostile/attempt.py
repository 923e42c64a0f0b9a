"""An attack, and one attempt at it.

An attempt sends requests, counts the answers, and records those that the attack does not allow.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

ATTACKER, WATCHER = "10.6.6.6", "10.0.0.1"
"""Addresses that clients claim in X-Forwarded-For.

ServeProcess lets Serve's proxy believe this machine.
"""

REQUEST_LIMIT_S = 30.0
MAX_FAULTS = 12
"""Number of distinct faults that are kept in words. The others are only counted."""

ERROR_FIELDS = {"message", "type", "param", "code"}
LOST = re.compile(
    r"engine (was|is|(of this replica )?has) (lost|gone|dead|stopped)|did not answer|died"
    r"|unavailable"
)
"""Matches what a server says about an engine that it believes to be dead."""

JSON_TYPE = {"content-type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to one request.

    status: 0 if no answer came. Then `ending` says how the request ended.
    text: the whole body.
    seconds: time until the end of the body.
    """

    status: int
    text: str
    seconds: float
    ending: str = ""

    @property
    def kind(self) -> str:
        """Return the name under which the table counts this answer."""
        if not self.status:
            return self.ending
        if self.status == 200:
            return "200, then an error event" if "event: error" in self.text else "200"
        return (
            f"{self.status} (engine lost)"
            if self.status == 503 and LOST.search(self.text)
            else str(self.status)
        )

    def json(self) -> Any:
        return json.loads(self.text)


def is_failure(kind: str) -> bool:
    """Return whether `kind` is an answer that a working server never gives, such as 500.

    503 and 504 are allowed, because they may mean that the server is busy.
    """
    return kind.startswith(("500", "501", "502", "503 (engine lost)", "200, then an error event"))


def in_error_shape(text: str) -> bool:
    """Return whether `text` is OpenAI's error object."""
    try:
        error = json.loads(text)["error"]
        return isinstance(error, dict) and error.keys() >= ERROR_FIELDS
    except (ValueError, LookupError, TypeError):
        return False


def nested(depth: int, inner: bytes = b"1") -> bytes:
    """Return JSON text of nested lists.

    json.dumps cannot write it, because json.dumps limits the depth.
    """
    return b"[" * depth + inner + b"]" * depth


def json_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@dataclass
class Attempt:
    """One attack that is being played.

    headers: sent with each request.
    keys: API keys by name.
    kill: kills the server's processes whose command line contains a text, and returns their number.
        None: the server is not ours.
    told: number of requests by the kind of their answer.
    faults: demands that did not hold, in words.
    """

    url: str
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    kill: Callable[[str], int] | None = None
    told: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    session: aiohttp.ClientSession | None = None
    model: str = "stories"
    encoder: str = "all-MiniLM-L6-v2"

    @property
    def host(self) -> str:
        return str(urlsplit(self.url).hostname)

    @property
    def port(self) -> int:
        return int(urlsplit(self.url).port or 80)

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    def at(self, path: str) -> URL:
        """Return the URL of `path`. The path is sent unchanged."""
        return URL(self.url + path, encoded=True)

    def fault(self, words: str) -> None:
        if words in self.faults or len(self.faults) < MAX_FAULTS:
            self.faults[words] += 1
        else:
            self.faults["others"] += 1

    async def send(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        limit_s: float = REQUEST_LIMIT_S,
        count: bool = True,
    ) -> Reply:
        """Send one request, and read its answer to the end.

        It never raises because of what the server does. An error that does not have the shape of
        OpenAI's errors is a fault.

        body: a JSON value, or bytes that are sent unchanged.
        """
        assert self.session is not None
        start = time.monotonic()
        sent = {**JSON_TYPE, **self.headers, **(headers or {})}
        data = None if body is None else json_bytes(body)
        try:
            async with asyncio.timeout(limit_s):
                async with self.session.request(
                    method, self.at(path), data=data, headers=sent
                ) as answer:
                    text = (await answer.read()).decode("utf-8", "replace")
                    reply = Reply(status=answer.status, text=text, seconds=time.monotonic() - start)
        except TimeoutError:
            reply = Reply(
                status=0,
                text="",
                seconds=time.monotonic() - start,
                ending=f"no answer in {limit_s:.0f} s",
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reply = Reply(
                status=0,
                text=repr(error),
                seconds=time.monotonic() - start,
                ending="connection lost",
            )
        if count:
            self.note(path, method, reply)
        return reply

    def note(self, path: str, method: str, reply: Reply) -> None:
        self.told[reply.kind] += 1
        if reply.status >= 400 and method != "HEAD" and not in_error_shape(reply.text):
            self.fault(f"{path}: {reply.status} is not in OpenAI's shape: {reply.text[:60]!r}")

    async def expect(
        self, what: str, path: str, body: Any, *statuses: int, **options: Any
    ) -> Reply:
        """Send a request. A status that is not in `statuses` is a fault."""
        reply = await self.send(path, body, **options)
        if reply.status not in statuses:
            self.fault(f"{what}: {reply.kind}")
        return reply

    async def leave(self, path: str, body: Any, after_s: float) -> None:
        """Send a request, and close the connection after `after_s` seconds."""
        reply = await self.send(path, body, limit_s=after_s, count=False)
        self.told["left" if not reply.status else reply.kind] += 1

    async def together(self, num: int, one: Callable[[int], Awaitable[Any]]) -> list[Any]:
        """Run `one(0)` to `one(num - 1)` concurrently. Return their results in order."""
        return await asyncio.gather(*(one(number) for number in range(num)))


Play = Callable[[Attempt], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack.

    finding: number of the finding in issue 17; 43: a finding of issue 43. 0: none of its own.
    play: sends the requests. Its docstring says what it sends and which answers it demands.
    limit_s: the attempt is cut off after this time.
    keyed: the attack needs a server with keys.
    sees: the attack needs a server whose model reads images.
    breaks: the attack kills processes, so watchers may get errors.
    bounded: against a correct server it ends by itself within seconds, so the test in CI plays it.
    """

    name: str
    finding: int
    play: Play
    limit_s: float = 90.0
    keyed: bool = False
    sees: bool = False
    breaks: bool = False
    bounded: bool = False

    @property
    def told(self) -> str:
        return " ".join((self.play.__doc__ or "").split())


ATTACKS: dict[str, Attack] = {}


def attack(finding: int, **options: Any) -> Callable[[Play], Play]:
    """Register the decorated function as an attack, under its name with dashes."""

    def add(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        ATTACKS[name] = Attack(name=name, finding=finding, play=play, **options)
        return play

    return add


async def attempt_to(play: Attack, attempt: Attempt) -> None:
    """Play the attack, for at most its time limit."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        attempt.url, connector=connector, timeout=aiohttp.ClientTimeout(None)
    ) as session:
        attempt.session = session
        try:
            async with asyncio.timeout(max(play.limit_s, attempt.seconds)):
                await play.play(attempt)
        except TimeoutError:
            attempt.fault(f"cut off after {max(play.limit_s, attempt.seconds):.0f} s")
