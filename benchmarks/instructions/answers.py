"""Requests of the benchmark, their answers, and the file that keeps the answers between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NEGATIVE_ALONE = 0.0
"""Scale 0 is the negative stream alone, so it is served as a plain request of that conversation."""
PLAIN = 1.0


@dataclass(frozen=True)
class Request:
    table: str
    """ "instructions" or "context"."""
    prompt: str
    """The name of the `Prompt` or `Item`."""
    mode: str
    """ "greedy" or "sampled"."""
    scale: float
    sample: int
    """0 for greedy; else which of the samples of this prompt."""
    conditional: list[int]
    """Token ids, as rendered by the chat template. So is the negative."""
    negative: list[int]
    temperature: float
    max_tokens: int
    seed: int
    """The same at each scale."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further guidance fields, of a guided request."""

    def key(self, model: str) -> str:
        """Identifies an answer in the file. Another model, prompt or option has another key."""
        values = asdict(self)
        if not self.fields:  # files of before there were any are still read
            del values["fields"]
        text = json.dumps([model, values])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answer:
    key: str
    table: str
    prompt: str
    mode: str
    scale: float
    sample: int
    text: str
    ended: bool
    """The model ended it, before `max_tokens`."""
    tokens: int
    """The token that ends the answer is not counted."""
    loss: float | None
    """Nats per token: see `fluency`. None if the answer is empty."""
    repetition: float | None
    """The share of repeated 4-grams. None if there is no 4-gram."""


class AnswerFile:
    """Answers by key, in a file of JSON lines if there is a path. A cut line is passed over."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._answers: dict[str, Answer] = {}
        if path is None or not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            try:
                answer = Answer(**json.loads(line))
            except (ValueError, TypeError):
                continue
            self._answers[answer.key] = answer
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def add(self, answers: Iterable[Answer]) -> None:
        lines = []
        for answer in answers:
            self._answers[answer.key] = answer
            lines.append(json.dumps(asdict(answer)) + "\n")
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
