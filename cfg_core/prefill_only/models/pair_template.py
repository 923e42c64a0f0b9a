"""Templates of rerankers that are language models: a query and a document become one prompt.

Pure: this module imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cfg_core.errors import ConfigError

FIELDS = ("instruction", "query", "document")
_FIELD = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """A prompt with the fields `{query}`, `{document}` and perhaps `{instruction}`."""

    text: str
    """The prompt with an instruction. Without the field, the model takes none."""
    instruction: str = ""
    """The instruction of requests that send none."""
    plain: str | None = None
    """The prompt of requests that send none, if it is another one than `text`."""

    def __post_init__(self) -> None:
        for text in (self.text, *([] if self.plain is None else [self.plain])):
            fields = _FIELD.findall(text)
            if any(fields.count(name) != 1 for name in ("query", "document")):
                raise ConfigError(
                    "score_template must have each of the fields {query} and {document} once."
                )
        if self.takes_instruction and self.plain is None and not self.instruction:
            raise ConfigError(
                "score_template has the field {instruction}: set `instruction`, too, for requests"
                " that send none."
            )

    @property
    def takes_instruction(self) -> bool:
        return "{instruction}" in self.text

    def render(self, query: str, document: str, instruction: str = "") -> RenderedPair:
        """The prompt of a pair. An empty instruction means that of the template."""
        text = self.text if instruction or self.plain is None else self.plain
        values = {
            "query": query,
            "document": document,
            "instruction": instruction or self.instruction,
        }
        parts: list[str] = []
        start = 0
        for place, piece in enumerate(_pieces(text)):
            part = values[piece] if place % 2 else piece
            if place % 2 and piece == "document":
                start = sum(map(len, parts))
            parts.append(part)
        return RenderedPair("".join(parts), start, start + len(document))

    def is_in(self, query: str) -> bool:
        """Whether `query` already begins as a whole prompt does."""
        opening = _pieces(self.text)[0].strip()
        return bool(opening) and query.lstrip().startswith(opening)


@dataclass(frozen=True, slots=True)
class RenderedPair:
    """A prompt, and where the document begins and ends in it."""

    text: str
    start: int
    end: int


@lru_cache(maxsize=16)
def _pieces(text: str) -> list[str]:
    """Literal text and names of fields in turns, beginning and ending with text."""
    return _FIELD.split(text)


QWEN3_RERANKER = PairTemplate(
    text=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""The template that the model card of Qwen3-Reranker publishes."""

QWEN3_RERANKER_TOKENS = ("no", "yes")
QWEN3_RERANKER_LENGTH = 8192
"""The longest prompt in the model card's code, in tokens."""


def is_qwen3_reranker(path: Path, config: Mapping[str, object]) -> bool:
    """Whether a directory is a Qwen3-Reranker as published.

    Nothing in its files says so, so the name of the directory, or of the repository on the hub,
    decides.
    """
    named = any("qwen3-reranker" in part.lower() for part in path.parts)
    return named and config.get("model_type") == "qwen3"


# ---- chat templates ------------------------------------------------------------------------------

_MARKS = {name: f"\u2039{name}\u203a" for name in FIELDS}
_SYSTEM, _QUERY, _DOCUMENT = (
    {"role": role, "content": f" {_MARKS[name]} "}
    for role, name in (("system", "instruction"), ("query", "query"), ("document", "document"))
)


def from_chat_template(render: Callable[[Sequence[Mapping[str, str]]], str]) -> PairTemplate | None:
    """The template that a chat template makes of messages with the roles query and document.

    sentence-transformers saves rerankers so. The instruction is the system message. None: the chat
    template does not show both texts. It must show them as they are.

    render: the prompt of some messages. Whatever it raises for these roles counts as None.
    """
    try:
        prompts = render([_QUERY, _DOCUMENT]), render([_SYSTEM, _QUERY, _DOCUMENT])
    except Exception:
        return None
    plain, instructed = map(_as_fields, prompts)
    if any(f"{{{name}}}" not in plain for name in ("query", "document")):
        return None
    return PairTemplate(text=instructed, plain=plain)


def _as_fields(prompt: str) -> str:
    for name, mark in _MARKS.items():
        if mark in prompt and f" {mark} " not in prompt:
            raise ConfigError(
                f"the chat template of this reranker changes the {name}: set `score_template`."
            )
        prompt = prompt.replace(f" {mark} ", f"{{{name}}}")
    return prompt
