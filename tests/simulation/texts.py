"""What the tokens of a simulated request are, and which of them are guided."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

VOCAB = 256
GARBAGE = 3  # a draft that is always wrong
MOST_TOKENS = 40  # no output is as long


def model_token(leader: str, index: int) -> int:
    """The token that the guided model samples as output `index` of this leader."""
    return 4 + zlib.crc32(f"{leader}:{index}".encode()) % 250


@dataclass(frozen=True)
class Rules:
    """What must hold for the tokens of one guided request, as the request said it.

    scales: (first token, scale) of a pair; empty with `weights`.
    weights: one for each follower.
    lengths: tokens of the followers' own prompts, with those that are scored.
    scored: tokens at the end of all prompts that are scored.
    opens: for each output token, whether markers allow to guide it; None without markers.
    since: for each output token, how many of those before it the followers do not have.
    suffix: the tokens behind which the leader is its own negative; it has no followers then.
    gates: for each output token, whether its gate is open; None without gates.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[tuple[int, float], ...] = ()
    start: int = 0
    end: int = 1_000_000
    scored: int = 0
    opens: tuple[bool, ...] | None = None
    since: tuple[int, ...] | None = None
    suffix: tuple[int, ...] = ()
    gates: tuple[bool, ...] | None = None

    def guides(self, token: int) -> bool:
        is_open = self.opens is None or self.opens[token]
        return is_open and self.start <= token < self.end

    def before_followers(self, token: int) -> int:
        return 0 if self.since is None else self.since[token]

    def weights_at(self, token: int) -> tuple[float, ...]:
        if self.weights:
            return (1.0 - sum(self.weights), *self.weights)
        scale = [scale for first, scale in self.scales if first <= token][-1]
        return (scale, 1 - scale)


def random_gates(leader: str, percent: int) -> tuple[bool, ...]:
    """Gates of which so many are open, mostly in runs."""
    runs = (zlib.crc32(f"{leader}|{index // 3}".encode()) for index in range(MOST_TOKENS))
    lone = (zlib.crc32(f"{leader}!{index}".encode()) for index in range(MOST_TOKENS))
    return tuple((a if b % 4 else b // 4) % 100 < percent for a, b in zip(runs, lone, strict=True))


def between_markers(
    leader: str, prompt: list[int], start: int, end: int, restart: bool
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """`opens` and `since` of a text, from its definition: token by token over the whole text."""
    opens, since = [], []
    for index in range(MOST_TOKENS):
        text = [*prompt, *(model_token(leader, i) for i in range(index))]
        starts = [i for i, token in enumerate(text) if token == start]
        ends = [i for i, token in enumerate(text) if token == end]
        opens.append(bool(starts) and max(starts) > max(ends, default=-1))
        in_output = [i + 1 - len(prompt) for i in starts if i >= len(prompt)]
        since.append(max(in_output, default=0) if restart else 0)
    return tuple(opens), tuple(since)
