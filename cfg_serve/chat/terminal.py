"""Read lines, and show answers as they come; side by side if there are several scales."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cfg_serve.chat import client as server
from cfg_serve.chat.session import HELP, Session, Step, step
from cfg_serve.errors import CommandError

FRAMES_PER_S = 8


def run(url: str, session: Session, key: str | None) -> int:
    """Chat until /quit or Ctrl-D; returns the exit status.

    Raises CommandError if the server cannot be reached at the start. Later errors are shown, and
    the chat goes on.
    """
    console = Console(highlight=False)
    model = session.model or server.first_model(url, key)
    session = replace(session, model=model)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 # lines can be edited, and the arrows find earlier ones
    if sys.stdin.isatty():
        console.print(f"{session.shown()}\n{HELP}", markup=False)
    while (line := _line(console)) is not None:
        try:
            told = step(session, line)
            session = _do(told, url, key, console)
        except CommandError as error:
            console.print(str(error), style="red", markup=False)
            continue
        except KeyboardInterrupt:
            console.print("(interrupted)")
            continue
        if told.ends:
            break
    return 0


def _line(console: Console) -> str | None:
    """The next line; None at the end of the input, or after Ctrl-C."""
    try:
        return input("> ") if sys.stdin.isatty() else input()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _do(told: Step, url: str, key: str | None, console: Console) -> Session:
    """Carry out a step; returns the session after it."""
    if told.say:
        console.print(told.say, markup=False)
    if not told.question:
        return told.session
    bodies, scales = told.session.bodies(told.question), told.session.scales
    answers = asyncio.run(_ask(url, key, bodies, _view(console, scales)))
    return told.session.answered(told.question, answers[-1])


class _Plain:
    """One answer, printed as it comes; several, one after the other when all are there."""

    def __init__(self, console: Console, scales: Sequence[float]) -> None:
        self._console, self._scales = console, scales

    def __enter__(self) -> _Plain:
        return self

    def add(self, at: int, piece: str) -> None:
        if len(self._scales) == 1:
            self._console.print(piece, end="", markup=False, soft_wrap=True)

    def end(self, answers: Sequence[str]) -> None:
        if len(self._scales) == 1:
            self._console.print()
            return
        for scale, answer in zip(self._scales, answers, strict=True):
            self._console.print(f"scale {scale:g}:\n{answer}\n", markup=False, soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        pass


class _Columns:
    """A column for each scale, which grows while the answers come."""

    def __init__(self, console: Console, scales: Sequence[float]) -> None:
        self._texts = [Text() for _ in scales]
        self._table = Table.grid(expand=True)
        for _ in scales:
            self._table.add_column(ratio=1)
        panels = (
            Panel(text, title=f"scale {scale:g}")
            for text, scale in zip(self._texts, scales, strict=True)
        )
        self._table.add_row(*panels)
        self._live = Live(self._table, console=console, refresh_per_second=FRAMES_PER_S)

    def __enter__(self) -> _Columns:
        self._live.start()
        return self

    def add(self, at: int, piece: str) -> None:
        self._texts[at].append(piece)

    def end(self, answers: Sequence[str]) -> None:
        self._live.refresh()

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def _view(console: Console, scales: Sequence[float]) -> _Plain | _Columns:
    several = len(scales) > 1 and console.is_terminal
    return _Columns(console, scales) if several else _Plain(console, scales)


async def _ask(
    url: str, key: str | None, bodies: Sequence[dict[str, Any]], view: _Plain | _Columns
) -> list[str]:
    """All answers, at the same time. Raises CommandError for the first that fails."""
    timeout = httpx.Timeout(None, connect=10)
    async with httpx.AsyncClient(headers=server.headers(key), timeout=timeout) as client:
        with view:
            tasks = [_answer(client, url, body, at, view) for at, body in enumerate(bodies)]
            answers = await asyncio.gather(*tasks)
            view.end(answers)
    return answers


async def _answer(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], at: int, view: _Plain | _Columns
) -> str:
    text = ""
    async for piece in server.pieces(client, url, body):
        text += piece
        view.add(at, piece)
    return text
