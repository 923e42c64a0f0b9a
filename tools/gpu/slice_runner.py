"""Runs slices one after the other, each within its limit, and keeps what they found.

Each slice leaves two files in the output folder: NAME.json (a Result) and NAME.txt (what it
printed). A slice that has its Result is not run again, whatever the Result says: a second try of
what failed would take the time of those that have not run. `only` runs it again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .slices import Slice

ROOT = Path(__file__).resolve().parents[2]
DONE, FAILED, LATE, CANNOT = "done", "failed", "ended at its limit", "cannot run here"
LEAST = 0.5
"""A slice does not start if less than this part of its limit is left."""
KILL_S = 15
"""Seconds between asking a slice to end, and killing it."""
MOST_TEXT = 1_000_000
COUNTS = re.compile(r"\b(\d+) (passed|failed|skipped|errors?)\b")
WORST = re.compile(r"^([\w-]+): worst (.+)$", re.MULTILINE)
"""What tests/gpu/test_equality_gpu.py prints for each engine."""


@dataclass(frozen=True)
class Result:
    """What became of a slice.

    figures: the JSON object that its command wrote, or the counts of pytest.
    """

    name: str
    what: str
    status: str
    command: str
    seconds: float = 0.0
    limit_s: float = 0.0
    rehearsal: bool = False
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Runs slices, and writes their files to `out`, which is made.

    missing: why a need is not met, or None (needs.missing).
    environment: the variables of a slice's process.
    """

    def __init__(
        self,
        out: Path,
        missing: Callable[[str], str | None],
        environment: Callable[[Slice], dict[str, str]],
        rehearse: bool = False,
    ) -> None:
        self._out, self._missing, self._environment = out, missing, environment
        self._rehearse = rehearse
        out.mkdir(parents=True, exist_ok=True)

    def run(self, slices: Sequence[Slice], budget_s: float, again: bool = False) -> list[Result]:
        """Run those that have no Result yet, or all if `again`. Returns the new Results.

        A slice whose limit does not fit what is left of the budget gets what is left, but at least
        LEAST of its limit; otherwise it is left for the next run, and a shorter one may run.
        """
        end, found = time.monotonic() + budget_s, []
        for one in slices:
            left = end - time.monotonic()
            if (again or self.result(one) is None) and left >= LEAST * one.limit_s:
                found.append(self._run(one, min(one.limit_s, left)))
        return found

    def result(self, one: Slice) -> Result | None:
        path = self._out / f"{one.name}.json"
        return Result(**json.loads(path.read_text("utf-8"))) if path.exists() else None

    def _run(self, one: Slice, limit_s: float) -> Result:
        command = (one.rehearsal if self._rehearse else "") or one.command
        made = Result(one.name, one.what, CANNOT, command, 0.0, limit_s, self._rehearse)
        text = "; ".join(why for need in one.needs if (why := self._missing(need)))
        made = replace(made, why=text)
        if not text:
            made, text = self._executed(one, made, limit_s)
        (self._out / f"{one.name}.txt").write_text(text[-MOST_TEXT:], "utf-8")
        (self._out / f"{one.name}.json").write_text(json.dumps(asdict(made), indent=1), "utf-8")
        return made

    def _executed(self, one: Slice, planned: Result, limit_s: float) -> tuple[Result, str]:
        figures, log = self._out / f".{one.name}.figures", self._out / f".{one.name}.log"
        figures.unlink(missing_ok=True)
        command = shlex.split(planned.command.replace("{figures}", str(figures.resolve())))
        began = time.monotonic()
        with log.open("wb") as file:
            status = limited([sys.executable, *command], self._environment(one), file, limit_s)
        text = log.read_text("utf-8", errors="replace")
        found = _figures(figures, text)
        for path in (figures, log):
            path.unlink(missing_ok=True)
        verdict, why = _verdict(status, found)
        seconds = round(time.monotonic() - began, 1)
        return replace(planned, status=verdict, why=why, seconds=seconds, figures=found), text


def limited(
    command: Sequence[str], environment: dict[str, str], output: Any, limit_s: float
) -> int | None:
    """The exit status of a command; None if it was ended after `limit_s` seconds.

    It is interrupted first, so that a server can end what it has started, and pytest says what has
    failed so far.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _figures(path: Path, text: str) -> dict[str, Any]:
    """The JSON object of the file, or what pytest tells: counts, and the worst token of each test.

    Empty if there is neither.
    """
    if path.exists():
        try:
            found = json.loads(path.read_text("utf-8"))
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
    lines = [line for line in text.splitlines() if COUNTS.search(line)]
    counts = COUNTS.findall(lines[-1]) if lines else ()
    worst = dict(WORST.findall(text))
    return {name: int(count) for count, name in counts} | ({"worst": worst} if worst else {})


def _verdict(status: int | None, figures: dict[str, Any]) -> tuple[str, str]:
    """The status of a slice, and why."""
    if status is None:
        return LATE, "its text says how far it came"
    if figures.keys() == {"skipped"}:
        return CANNOT, "all its tests were skipped; its text has the reason"
    if status != 0:
        return FAILED, f"exit status {status}; see its text"
    return DONE, ""


def table(results: Sequence[Result | None], slices: Sequence[Slice]) -> str:
    """The Results as a table in Markdown, one row for each slice."""
    rows = ["| slice | status | s | figures |", "|---|---|---|---|"]
    for one, result in zip(slices, results, strict=True):
        if result is None:
            rows.append(f"| {one.name} | not run yet | | {one.what} |")
            continue
        short = result.figures.get("headline") or _short(result.figures)
        told = "; ".join(filter(None, [short, result.why]))
        rows.append(f"| {one.name} | {result.status} | {result.seconds:.0f} | {told} |")
    return "\n".join(rows)


def _short(figures: dict[str, Any]) -> str:
    """The figures that are numbers or short texts."""
    told = {k: v for k, v in figures.items() if isinstance(v, int | float | str)}
    return ", ".join(f"{name} {value}" for name, value in told.items())[:200]
