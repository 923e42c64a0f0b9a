"""Table 1: 14 families of 10 instructions, each with a question and a checker (prompts.jsonl).

The conditional conversation has the instruction as its system message. The negative conversation
has `NEGATIVE` there, and the same question.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path
from typing import Any

from . import checkers
from .checkers import Checker

DATA = Path(__file__).with_name("prompts.jsonl")
"""Each line: the family, the name of the function in checkers.py and its argument if it has one,
the instruction and the question."""
NEGATIVE = "You are a helpful assistant."
MAX_TOKENS = 80


@dataclass(frozen=True)
class Prompt:
    name: str
    """The family and a number, such as "word/3"."""
    family: str
    instruction: str
    question: str
    checker: Checker

    def conditional(self) -> list[dict[str, str]]:
        return conversation(self.instruction, self.question)

    def negative(self) -> list[dict[str, str]]:
        return conversation(NEGATIVE, self.question)


def conversation(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def prompts(most: int | None = None) -> list[Prompt]:
    """All prompts, or the first `most`. The families take turns, so that a part is varied."""
    return [
        Prompt(name, row["family"], row["instruction"], row["question"], _checker(row))
        for name, row in named_rows(DATA)
    ][:most]


def arithmetic(most: int | None = None) -> list[Prompt]:
    """60 sums, differences and products of small numbers, as a child would be asked.

    Instead of an instruction, the conditional conversation has `NEGATIVE`.
    """
    rng = random.Random(5)
    found: list[Prompt] = []
    for sign, compute, largest in (("+", add, 60), ("-", sub, 60), ("x", mul, 13)):
        pairs = [(a, b) for a in range(2, largest) for b in range(2, a)]
        for a, b in rng.sample(pairs, 20):
            question = f"What is {a} {sign} {b}? End with the number."
            check = checkers.last_number(compute(a, b))
            name = f"arithmetic/{len(found)}"
            found.append(Prompt(name, "arithmetic", NEGATIVE, question, check))
    return found[:most]


def named_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file of data. The name of each is its family and a number, as "word/3"."""
    numbers: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        family = row["family"]
        yield f"{family}/{numbers[family]}", row
        numbers[family] += 1


def _checker(row: dict[str, Any]) -> Checker:
    make = getattr(checkers, row["check"])
    made: Checker = make(row["argument"]) if "argument" in row else make()
    return made
