"""Table 2: passages that memory contradicts, or knows nothing about (context.jsonl).

Both conversations ask the same question with the same system message. Only the conditional one has
the passage. This is context-aware decoding (Shi et al. 2023, arXiv:2305.14739): its alpha is
`scale - 1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .checkers import has_phrase
from .prompts import conversation, named_rows

DATA = Path(__file__).with_name("context.jsonl")
"""Each line has the fields of an Item, but for its name."""
SYSTEM = "You are a helpful assistant. Answer in a few words."
MAX_TOKENS = 32


@dataclass(frozen=True)
class Item:
    name: str
    """ "counterfactual/3" or "invented/3"."""
    family: str
    passage: str
    question: str
    answers: tuple[str, ...]
    """Spellings of the passage's answer. One of them stands in the passage."""
    memory: tuple[str, ...]
    """Spellings of what is true outside the passage; none of an invented fact."""

    def conditional(self) -> list[dict[str, str]]:
        return conversation(
            SYSTEM,
            f"Answer from this passage only: {self.passage}\n\nQuestion: {self.question}",
        )

    def negative(self) -> list[dict[str, str]]:
        return conversation(SYSTEM, f"Question: {self.question}")

    def from_passage(self, text: str) -> bool:
        """Whether the text has the passage's answer. A text that was cut off may have it."""
        return _has_any(text, self.answers)

    def from_memory(self, text: str) -> bool:
        """Whether the text has memory's answer and not the passage's."""
        return _has_any(text, self.memory) and not self.from_passage(text)


def _has_any(text: str, phrases: Iterable[str]) -> bool:
    return any(has_phrase(text, phrase) for phrase in phrases)


def items(most: int | None = None) -> list[Item]:
    """All items, or the first `most`. Both families take turns until the shorter one ends."""
    return [
        Item(name, **{**row, "answers": tuple(row["answers"]), "memory": tuple(row["memory"])})
        for name, row in named_rows(DATA)
    ][:most]
