"""The tokens that an engine has processed for one HTTP request.

A key's `tokens_per_minute` is charged with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The tokens that the engine has processed for one request.

    prompt_tokens: tokens of each prompt and of each negative prompt. A prompt counts once, however
    many choices share it.
    output_tokens: tokens of all choices and all streams. A guided token counts once for each stream
    of its group.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class EncodedAnswer:
    """The answer of an encoder, as JSON text, and the number of tokens computed for it."""

    text: str
    num_tokens: int


class OutputCounts(NamedTuple):
    """What a Meter has counted of the output, for another replica that goes on with a request.

    strengths: `tokens`, `none`, `full` and `total` of its StrengthCounts.
    """

    output_tokens: int
    guided_tokens: int
    plain_tokens: int
    longest: int
    strengths: tuple[int, int, int, float]


class StrengthCounts:
    """Counts tokens of groups with limits or a rule by their strengths.

    tokens: all of them. none, full: those of which limits have left nothing, and all of the push.
    total: the sum of the strengths that are shown: how much was left, or with a rule the scales.
    """

    def __init__(self) -> None:
        self.tokens = self.none = self.full = 0
        self.total = 0.0

    def add(self, left: Sequence[float], shown: Sequence[float]) -> None:
        self.tokens += len(left)
        self.none += left.count(0.0)
        self.full += left.count(1.0)
        self.total += sum(shown)


class Meter:
    """Counts the usage of one request while it runs.

    The code that receives the engine's outputs adds to it. Used from one event loop.

    guided_tokens: output tokens of the leaders that came from joint steps, as the engine core
    counted them.
    plain_tokens: the other output tokens of the leaders.
    strengths: how strongly tokens were guided, of requests with limits or a rule.
    longest: output tokens of the longest choice.
    same: the followers, counted from 0, whose prompt is each leader's own prompt.
    negative_tokens: of the followers' own prompts of the newest prompt.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.guided_tokens = 0
        self.plain_tokens = 0
        self.strengths = StrengthCounts()
        self.longest = 0
        self.same: frozenset[int] | None = None
        self.negative_tokens = 0

    def add_output(self, tokens: int, guided: int, rows: int) -> None:
        """Count new output tokens of one choice.

        guided: how many of the tokens came from joint steps. The others are the leader's alone.
        rows: how many tokens were computed for each of these, of all streams and of a suffix.
        """
        self.output_tokens += tokens + guided * (rows - 1)
        self.guided_tokens += guided
        self.plain_tokens += tokens - guided

    def add_prompt(self, tokens: int, same: frozenset[int], negative_tokens: int = 0) -> None:
        """Count a prompt with its followers' own ones, which have `negative_tokens`.

        same: the followers whose prompt has the tokens of the leader's.
        """
        self.prompt_tokens += tokens + negative_tokens
        self.negative_tokens = negative_tokens
        self.same = same if self.same is None else self.same & same

    @property
    def counts(self) -> OutputCounts:
        """What has been counted of the output so far."""
        of = self.strengths
        return OutputCounts(
            self.output_tokens,
            self.guided_tokens,
            self.plain_tokens,
            self.longest,
            (of.tokens, of.none, of.full, of.total),
        )

    def go_on(self, counts: OutputCounts) -> None:
        """Begin with what another replica has counted."""
        self.output_tokens, self.guided_tokens, self.plain_tokens, self.longest, of = counts
        self.strengths.tokens, self.strengths.none, self.strengths.full, self.strengths.total = of

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
