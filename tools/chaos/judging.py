"""What clients saw of a fault, as a row of a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tools.serving.load import Outcome

RETRIED, MOVED = "retried_requests", "moved_streams"
"""Counters of the ingress, without their prefix and suffix."""


@dataclass
class Row:
    """The result of one fault.

    It counts the requests that were in flight when the fault was injected, and those that were sent
    until the service was restored.
    """

    fault: str
    in_flight: int
    asked: int
    right: int
    lost: int
    wrong: int
    retried: int
    moved: int
    told: dict[str, int]
    last_error_s: float | None
    slowest_s: float
    pause_s: float
    whole_s: float | None

    def __str__(self) -> str:
        told = ", ".join(f"{count} {kind}" for kind, count in self.told.items()) or "-"
        last = "-" if self.last_error_s is None else f"{self.last_error_s:.1f}"
        whole = "not reached" if self.whole_s is None else f"{self.whole_s:.0f}"
        return (
            f"| {self.fault} | {self.in_flight} | {self.asked} | {self.right} | {self.lost} |"
            f" {self.wrong} | {self.retried} | {self.moved} | {told} | {last} |"
            f" {self.slowest_s:.0f} | {self.pause_s:.1f} | {whole} |"
        )


HEADER = (
    "| fault | in flight | asked until whole | right | lost without an error | wrong | retried,"
    " unseen | moved | errors told | last error told after, s | longest request, s | longest pause"
    " of a stream, s | whole again after, s |\n" + "|---" * 13 + "|"
)


def judge(
    told: str, seen: list[Outcome], at: float, whole_s: float | None, counted: Counter[str]
) -> Row:
    kinds = [outcome.kind for outcome in seen]
    errors = [outcome for outcome in seen if outcome.kind not in ("right", "wrong", "lost")]
    return Row(
        fault=told,
        in_flight=sum(outcome.started < at for outcome in seen),
        asked=len(seen),
        right=kinds.count("right"),
        lost=kinds.count("lost"),
        wrong=kinds.count("wrong"),
        retried=counted[RETRIED],
        moved=counted[MOVED],
        told={kind: kinds.count(kind) for kind in sorted({e.kind for e in errors})},
        last_error_s=max((e.ended - at for e in errors), default=None),
        slowest_s=max(outcome.ended - outcome.started for outcome in seen),
        pause_s=max(outcome.pause for outcome in seen),
        whole_s=whole_s,
    )
