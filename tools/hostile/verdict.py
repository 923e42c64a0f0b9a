"""The rows of the table, and their verdicts.

A row compares the watchers' requests during an attack with those before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.hostile.attempt import Attack, is_failure
from tools.hostile.watchers import WAITING, Seen

READY = "/ready"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of a verdict.

    extra_wait_s: by how much a watcher may wait longer than without the attack.
    ready_s: how long /ready may take.
    memory: ratio of memory after a rest to memory before the attack.
    again: used if `memory` is exceeded. Ratio of memory after a second attack to memory after the
        first.
    """

    extra_wait_s: float = 2.0
    ready_s: float = 1.0
    memory: float = 1.1
    again: float = 1.05


BOUNDS = Bounds()


@dataclass
class Calm:
    """The slowest time of each class of watchers' requests without an attack."""

    slowest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, seen: Iterable[Seen]) -> None:
        for one in seen:
            if one.kind == "right":
                self.slowest[one.name] = max(self.slowest[one.name], one.ended - one.started)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Watchers' requests from the start of an attack until all was calm again.

    refused: number of answers with 429.
    told: number of answers that were neither right, wrong nor 429, by kind.
    waited: for each class, the longest wait beyond its slowest request without the attack, in
        seconds.
    slowest: the ten longest of these waits. Each has its class and its start, in seconds since the
        start of the attack.
    ready_s: the slowest answer of /ready.
    """

    right: int
    wrong: int
    refused: int
    told: dict[str, int]
    waited: dict[str, float]
    slowest: list[tuple[float, str, float]]
    ready_s: float

    @property
    def extra_wait_s(self) -> float:
        return max(self.waited.values(), default=0.0)

    @property
    def who_waited(self) -> str:
        return max(self.waited, key=self.waited.__getitem__, default="-")

    @classmethod
    def of(cls, seen: list[Seen], calm: Calm, started: float = 0.0) -> Watched:
        kinds = Counter(one.kind for one in seen)
        others = {k: n for k, n in kinds.items() if k not in ("right", "wrong", "429", WAITING)}
        waits = [
            (
                one.ended - one.started - calm.slowest[one.name],
                one.name,
                round(one.started - started, 1),
            )
            for one in seen
        ]
        waited: dict[str, float] = defaultdict(float)
        for extra_s, name, _ in waits:
            if name != READY:
                waited[name] = max(waited[name], extra_s)
        ready = [one.ended - one.started for one in seen if one.name == READY]
        return cls(
            right=kinds["right"],
            wrong=kinds["wrong"],
            refused=kinds["429"],
            told=others,
            waited=dict(waited),
            slowest=sorted(waits, reverse=True)[:10],
            ready_s=max(ready, default=0.0),
        )

    def faults(self, bounds: Bounds) -> list[str]:
        found = [f"{self.wrong} watchers' answers wrong"] if self.wrong else []
        found += [f"{self.refused} watchers refused"] if self.refused else []
        found += [f"{sum(self.told.values())} watchers told errors"] if self.told else []
        if self.extra_wait_s > bounds.extra_wait_s:
            found.append(f"{self.who_waited} waited {self.extra_wait_s:.1f} s longer")
        if self.ready_s > bounds.ready_s:
            found.append(f"/ready took {self.ready_s:.1f} s")
        return found


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the server held. None: not known.

    memory: bytes of all its processes before the attack, at the maximum, and after a rest. Shared
        pages are counted once.
    again: memory after a second attack. It is played if the first one left more memory in use,
        because memory that is allocated once, at first use, is not a leak.
    blocks: free KV blocks before and after.
    """

    memory: tuple[int, int, int] | None
    again: int | None = None
    blocks: tuple[int, int] | None

    def has_grown(self, bounds: Bounds = BOUNDS) -> bool:
        return self.memory is not None and self.memory[2] > bounds.memory * self.memory[0]

    def shown(self) -> str:
        """Return the memory as text, in MiB."""
        sizes = ", ".join(f"{size / MIB:.0f}" for size in self.memory or ())
        return sizes + (f", again {self.again / MIB:.0f}" if self.again is not None else "") or "-"

    def faults(self, bounds: Bounds) -> list[str]:
        found = []
        if self.memory is not None and self.has_grown(bounds):
            before, _, after = self.memory
            if self.again is None:
                found.append(f"memory is {100 * (after / before - 1):.0f} % above before")
            elif self.again > bounds.again * after:
                found.append(
                    f"memory grew by {100 * (self.again / after - 1):.0f} % when played again"
                )
        if self.blocks and self.blocks[0] != self.blocks[1]:
            found.append(f"{self.blocks[1]} KV blocks free, {self.blocks[0]} before")
        return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one attack.

    told: number of attackers' requests by the kind of their answer.
    faults: demands that did not hold, in words.
    calm_s: seconds from the end of the attack until watchers got answers as before. None: not
        within the limit.
    deaths: processes that died.
    """

    attack: Attack
    took_s: float
    told: dict[str, int]
    faults: dict[str, int]
    watched: Watched
    calm_s: float | None
    held: Held
    deaths: list[str]

    def complaints(self, bounds: Bounds = BOUNDS) -> list[str]:
        """Return the demands that did not hold. Empty: all held."""
        found = [f"{num} x {words}" if num > 1 else words for words, num in self.faults.items()]
        found += [
            f"{num} requests told {kind}" for kind, num in self.told.items() if is_failure(kind)
        ]
        if not self.attack.breaks:
            found += [*self.watched.faults(bounds), *self.deaths]
        return (
            found + (["not calm again"] if self.calm_s is None else []) + self.held.faults(bounds)
        )

    def __str__(self) -> str:
        watched = self.watched
        cells = [
            self.attack.name,
            str(self.attack.finding or "-"),
            counted(self.told),
            f"{watched.right}, {watched.wrong}, {watched.refused}",
            counted(watched.told),
            f"{watched.extra_wait_s:.1f} ({watched.who_waited})",
            f"{watched.ready_s:.1f}",
            "never" if self.calm_s is None else f"{self.calm_s:.0f}",
            self.held.shown(),
            "held" if not self.complaints() else "**not held**: " + "; ".join(self.complaints()),
        ]
        return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

    def as_json(self) -> dict[str, Any]:
        row = {
            name: value
            for name, value in vars(self).items()
            if name not in ("attack", "watched", "held")
        }
        attack = {
            "attack": self.attack.name,
            "finding": self.attack.finding,
            "sent": self.attack.told,
        }
        parts = {"watched": asdict(self.watched), "held": asdict(self.held)}
        return {**attack, **row, **parts, "complaints": self.complaints()}


def counted(told: dict[str, int]) -> str:
    return (
        ", ".join(
            f"{num} x {kind}" for kind, num in sorted(told.items(), key=lambda item: -item[1])
        )
        or "-"
    )


HEADER = (
    "| attack | finding | came back | watchers: right, wrong, 429 | errors told to watchers |"
    " longest extra wait, s | longest /ready, s | calm after, s | memory, MiB: before, most, after"
    " | verdict |\n" + "|---" * 10 + "|"
)
