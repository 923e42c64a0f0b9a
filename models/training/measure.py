"""Prompts and negatives for the embedded model, and what is counted in its stories.

A topic's opposite is the next one but four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .corpus import topic_counts
from .fluency import grammatical_share
from .topics import LEXICON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOPIC_NAMES = tuple(LEXICON)


def opposite(topic: str) -> str:
    return TOPIC_NAMES[(TOPIC_NAMES.index(topic) + 5) % len(TOPIC_NAMES)]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, kind: str, topic: str | None) -> list[int]:
    """A prompt as a server would encode it; without a topic it is the topic-free one."""
    name = LEXICON[topic].names[0] if topic else None
    if kind == "completion":
        story = f"Tell me a story about {name}.\n" if name else "Tell me a story.\n"
        return list(tokenizer.encode(story))
    system = "You are a storyteller." + (f" Write about {name}." if name else "")
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Tell me a story."},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def negative_ids(
    tokenizer: PreTrainedTokenizerFast, kind: str, negative: str, topic: str
) -> list[int]:
    """`free`: the prompt without a topic; `opposing`: about another topic."""
    return prompt_ids(tokenizer, kind, opposite(topic) if negative == "opposing" else None)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One line of the table; shares from 0 to 1."""

    on_topic: float
    on_opposite: float
    grammatical: float
    ended: float


def measure_point(tokenizer: PreTrainedTokenizerFast, texts: list[list[int]]) -> Point:
    """texts: row i is about topic i modulo the number of topics. Shares are of all words of all
    stories."""
    stories = [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
    topics = [TOPIC_NAMES[i % len(TOPIC_NAMES)] for i in range(len(stories))]
    counts = [topic_counts(text) for text in stories]
    total = sum(sum(count.values()) for count in counts)
    return Point(
        on_topic=sum(count[topic] for count, topic in zip(counts, topics, strict=True)) / total,
        on_opposite=sum(count[opposite(topic)] for count, topic in zip(counts, topics, strict=True))
        / total,
        grammatical=sum(map(grammatical_share, stories)) / len(stories),
        ended=sum(ids[-1] == tokenizer.eos_token_id for ids in texts) / len(texts),
    )
