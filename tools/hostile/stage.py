"""A server under attack and its watchers: their results before, during and after an attack."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace

import httpx
import psutil

from tools.hostile.attempt import ATTACKER, Attack, Attempt, attempt_to
from tools.hostile.server import (
    KEYS,
    Peak,
    Running,
    bearer,
    keyed_config,
    seeing_config,
    seeing_env,
)
from tools.hostile.verdict import BOUNDS, READY, Bounds, Calm, Held, Row, Watched
from tools.hostile.watchers import WAITING, Seen
from tools.hostile.watching import Watching
from tools.serving.process import ServeProcess, shipped_config

WARM_UP_S, CALM_S = 12.0, 5.0
CALM_LIMIT_S, REST_LIMIT_S = 60.0, 20.0
CLASSES = {"embedding", "grammar", READY}
"""Classes of watchers' requests besides the questions.

All is calm only after each class got a right answer.
"""


class Stage:
    """A server, its watchers, and their results without an attack. Use it as a context manager.

    url: of a running server. None: the stage starts the shipped configuration.
    keyed: the server has keys.
    sees: the server's model is a tiny LLaVA.
    warm_up_s, calm_s: how long watchers run alone, at first and before each attack.
    bounds: if memory grows beyond them, the attack is played a second time.
    """

    def __init__(
        self,
        url: str | None = None,
        keyed: bool = False,
        warm_up_s: float = WARM_UP_S,
        calm_s: float = CALM_S,
        bounds: Bounds = BOUNDS,
        sees: bool = False,
    ) -> None:
        self._sees = sees
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.keyed, self._given, self._warm_up_s, self._calm_s = keyed, url, warm_up_s, calm_s
        self._bounds = bounds
        self._own: ServeProcess | None = None
        self.server: ServeProcess | Running
        self.watching: Watching | None = None

    def __enter__(self) -> Stage:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        if self._given is None:
            self._own = self._server()
            self._own.wait_until_ready()
            self.server = self._own
        else:
            self.server = Running(self._given)
        self.watching = Watching(self.server.url, self.keyed, self._sees)
        self.watching.tell("learn")
        self.calm, self._is_lost = Calm(), False
        self._watch_calm(self._warm_up_s)

    def _server(self) -> ServeProcess:
        if not self._sees:
            return ServeProcess(keyed_config() if self.keyed else shipped_config())
        self._folder = tempfile.TemporaryDirectory(prefix="seeing-")
        return ServeProcess(seeing_config(self._folder.name), seeing_env())

    @property
    def _watchers(self) -> Watching:
        assert self.watching is not None
        return self.watching

    def stop(self) -> None:
        if self.watching:
            self.watching.stop()
        if self._own:
            self._own.stop()
        if self._folder:
            self._folder.cleanup()
        self.watching = self._own = self._folder = None

    def restart(self) -> None:
        self.stop()
        self._start()

    # --- one attack -------------------------------------------------------------------------------

    def play(self, attack: Attack, seconds: float) -> Row:
        """Play an attack, and wait until all is calm again.

        If our own server did not recover from the last attack, it is restarted first.
        """
        if self._is_lost and self._own:
            print("  the server did not recover, and is restarted", flush=True)
            self.restart()
        self._watchers.tell("pause")
        blocks, memory, engines = self.free_blocks(), self.server.memory_bytes(), self._engines()
        self._watch_calm(self._calm_s)
        attempt, most, started = self._attempt(attack, seconds), Peak(self.server), time.monotonic()
        asyncio.run(attempt_to(attack, attempt))
        ended = time.monotonic()
        seen, calm_s = self._until_calm(ended)
        row = Row(
            attack=attack,
            took_s=ended - started,
            told=dict(attempt.told),
            faults=dict(attempt.faults),
            watched=Watched.of(settled(seen), self.calm, started),
            calm_s=calm_s,
            held=self._held(blocks, memory, most),
            deaths=[f"{name} died" for name in sorted(engines - self._engines())],
        )
        self._is_lost = calm_s is None
        return (
            self._again(row, seconds)
            if row.held.has_grown(self._bounds) and not self._is_lost
            else row
        )

    def _again(self, row: Row, seconds: float) -> Row:
        """Play the attack of `row` a second time. Return `row` with the memory after that."""
        asyncio.run(attempt_to(row.attack, self._attempt(row.attack, seconds)))
        assert row.held.memory is not None
        return replace(row, held=replace(row.held, again=self._rested(row.held.memory[2])))

    def _held(self, blocks: int | None, memory: int, most: Peak) -> Held:
        self._watchers.tell("pause")
        after = self._rested(memory)
        peak = max(most.end(), memory, after)
        free = self.free_blocks()
        return Held(
            memory=(memory, peak, after) if memory else None,
            blocks=(blocks, free) if blocks is not None and free is not None else None,
        )

    def _attempt(self, attack: Attack, seconds: float) -> Attempt:
        return Attempt(
            url=self.server.url,
            seconds=seconds,
            headers={"X-Forwarded-For": ATTACKER, **(bearer("attacker") if self.keyed else {})},
            keys=KEYS if self.keyed else {},
            kill=self._kill if self._own else None,
        )

    def _watch_calm(self, seconds: float) -> None:
        """Record the watchers' results without an attack, for later comparison."""
        self._watchers.tell("go")
        self._watchers.collect()
        time.sleep(seconds)
        self.calm.add(self._watchers.collect())

    def _until_calm(self, ended: float) -> tuple[list[Seen], float | None]:
        """Wait until all is calm. Return the watchers' results since the attack began, and a time.

        All is calm once each class got a right answer, and no watcher got anything else for two
        seconds. The time is in seconds since `ended`, the end of the attack. None: the limit was
        reached first.
        """
        seen = self._watchers.collect()
        while time.monotonic() - ended < CALM_LIMIT_S:
            time.sleep(1)
            seen += self._watchers.collect()
            bad = max([ended, *(one.ended for one in seen if one.kind not in ("right", WAITING))])
            right = {
                one.name: one.ended
                for one in reversed(seen)
                if one.kind == "right" and one.started > bad
            }
            questions = [name for name in right if name not in CLASSES]
            if right.keys() >= CLASSES and questions and time.monotonic() - bad > 2:
                return seen, max(*(right[name] for name in CLASSES), right[questions[0]]) - ended
        return seen, None

    # --- what the server holds --------------------------------------------------------------------

    def free_blocks(self) -> int | None:
        """Wait until the engine is idle. Return its free KV blocks.

        None: the server does not answer, or the engine does not get idle.
        """
        for _ in range(40):
            with suppress(httpx.HTTPError, LookupError):
                state = httpx.get(f"{self.server.url}/ready", timeout=30).json()["engine"]
                if state["running"] == state["waiting"] == state["groups"] == 0:
                    return int(state["free_blocks"])
            time.sleep(0.25)
        return None

    def _rested(self, before: int) -> int:
        """Return the memory after a rest.

        The rest ends as soon as memory is back within the bounds, or after REST_LIMIT_S.
        """
        deadline = time.monotonic() + REST_LIMIT_S
        while (
            size := self.server.memory_bytes()
        ) > self._bounds.memory * before and time.monotonic() < deadline:
            time.sleep(2)
        return size

    def _engines(self) -> set[str]:
        """Return name and process id of each engine and replica of the server."""
        found = set()
        for process in self.server.processes():
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())[:60]
                if "ServeReplica:" in title or "EngineCore" in title:
                    # Ray pads the title, or appends the name of a method.
                    name = title.split(".")[0].removeprefix("ray::").strip()
                    found.add(f"{name} {process.pid}")
        return found

    def _kill(self, title: str) -> int:
        """Kill the processes whose command line contains `title`. Return their number."""
        found = [
            process for process in self.server.processes() if title in " ".join(process.cmdline())
        ]
        for process in found:
            process.send_signal(signal.SIGKILL)
        return len(found)


def settled(seen: list[Seen]) -> list[Seen]:
    """Return `seen` with each request once.

    A request that still waited at a `collect` is reported again when it has ended.
    """
    last = {(one.name, one.started): one for one in seen}
    return list(last.values())
