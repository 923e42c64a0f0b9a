"""What is asked of every library, and what it may give back."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MODEL, ENCODER = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
KEY = "none"
SYSTEM, QUESTION = "You are a pirate.", "How do I make tea?"
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
OBJECT_CHAT = [
    CHAT[0],
    {"role": "user", "content": "What is your favourite food?"},
    {"role": "assistant", "content": '{"answer": "Bread with cheese."}'},
    {"role": "user", "content": "What is your favourite animal?"},
    {"role": "assistant", "content": '{"answer": "A little dog."}'},
    {"role": "user", "content": "What is your favourite drink?"},
]
PROMPT = "You are a pirate. This is how you make tea:"
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}
MOST_TOKENS, MOST_OBJECT_TOKENS = 24, 120
TIMEOUT_S = 120.0
Guidance = dict[str, Any] | None


@dataclass(frozen=True)
class Ask:
    """One request: where it goes, and in which mode."""

    url: str
    guided: bool
    streamed: bool

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that the server has beyond the library's own."""
        return dict(GUIDANCE) if self.guided else {}


@dataclass
class Answer:
    """What the library gave back: a text, in so many pieces, and the guidance object if shown."""

    text: str = ""
    guidance: Guidance = None
    pieces: int = 1

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[str | None, Guidance]]) -> Answer:
        """Pieces without text, such as one that ends a stream, do not count."""
        answer = cls(pieces=0)
        for text, guidance in pieces:
            answer.text += text or ""
            answer.pieces += bool(text)
            answer.guidance = guidance or answer.guidance
        return answer


@dataclass(frozen=True)
class Client:
    """One way into one library.

    generates: false for embeddings and counts, which have neither guidance nor streams.
    dropped: where the library drops the guidance object: "", "streams" or "all".
    note: says how, below the table.
    """

    name: str
    package: str
    ask: Callable[[Ask], Answer]
    generates: bool = True
    dropped: str = ""
    note: str = ""

    def drops(self, streamed: bool) -> bool:
        return self.dropped == "all" or (self.dropped == "streams" and streamed)

    def has(self, guided: bool, streamed: bool) -> bool:
        return self.generates or not (guided or streamed)


def load(module: str) -> Any:
    """A client library: imported late, so that one that is missing fails its own rows alone."""
    return importlib.import_module(module)


def guidance_of(answer: Any) -> Guidance:
    """The guidance object among the fields that a pydantic model of a library does not know."""
    found: Guidance = (getattr(answer, "model_extra", None) or {}).get("guidance")
    return found


def vector_text(vector: Iterable[float]) -> str:
    """A vector as a text, empty if it has no number other than 0."""
    numbers = list(vector)
    return json.dumps(numbers) if any(numbers) else ""
