"""Ask every client in every mode, and print the table."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys

from tools.real_clients import frameworks, libraries
from tools.real_clients.asking import Answer, Ask, Client

CLIENTS = [*libraries.CLIENTS, *frameworks.CLIENTS]
MODES = [(guided, streamed) for streamed in (False, True) for guided in (False, True)]
HEADS = ["client", "version", "plain", "guided", "streamed", "streamed guided"]


def judged(client: Client, answer: Answer, ask: Ask, plain: Answer | None) -> str:
    """The cell of an answer. Raises AssertionError with what is wrong."""
    assert answer.text.strip(), "no text"
    assert not ask.streamed or answer.pieces > 1, f"in one piece: {answer.text!r}"
    if not ask.guided:
        assert not answer.guidance, f"a plain answer with {answer.guidance}"
        return "ok"
    if client.drops(ask.streamed):
        assert not answer.guidance, (
            "the library shows the guidance object; the table says it drops it"
        )
        assert plain is not None, "no plain answer to compare with"
        assert answer.text != plain.text, f"the text of the plain one: {answer.text!r}"
        return "differs"
    assert answer.guidance, "no guidance object"
    tokens = answer.guidance["guided_tokens"]
    assert tokens > 0, f"not guided: {answer.guidance}"
    return f"ok, {tokens} tokens"


def row_of(client: Client, url: str, faults: list[str]) -> list[str]:
    """The line of the table; what is wrong goes to `faults`."""
    answers: dict[bool, Answer] = {}  # the plain ones
    cells = []
    for guided, streamed in MODES:
        if not client.has(guided, streamed):
            cells.append("-")
            continue
        ask = Ask(url, guided, streamed)
        try:
            answer = client.ask(ask)
            if not guided:
                answers[streamed] = answer
            cells.append(judged(client, answer, ask, answers.get(streamed)))
        except Exception as error:  # every library has its own kinds
            cells.append("FAIL")
            mode = f"{'streamed ' * streamed}{'guided' if guided else 'plain'}"
            faults.append(f"{client.name}, {mode}: {type(error).__name__}: {error}")
    return [client.name, version_of(client.package), *cells]


def version_of(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}: not installed"


def show(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [HEADS, *rows]) for i in range(len(HEADS))]
    for row in [HEADS, ["-" * width for width in widths], *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Ask a running server with the real client libraries."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of clients")
    chosen = parser.parse_args()
    clients = [c for c in CLIENTS if any(part in c.name for part in chosen.only)]
    faults: list[str] = []
    show([row_of(client, chosen.url.rstrip("/"), faults) for client in clients])
    dropped = {f"{c.package} {c.note}" for c in clients if c.dropped}
    for line in [*sorted(dropped), *faults]:
        print(line)
    return 1 if faults or not clients else 0


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm else fetches a list
    sys.exit(main())
