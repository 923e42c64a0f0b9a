"""What the engine has done for one HTTP request, in tokens: what a key's `tokens_per_minute` is
charged with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Usage:
    """prompt_tokens: of each prompt and of each negative prompt, counted once however many choices
    share it. output_tokens: of all choices and of all streams; each guided token counts once for
    each stream of its group."""

    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The answer of an encoder, as JSON text, and the tokens that it took."""

    text: str
    num_tokens: int


class Meter:
    """Counts the usage of one request while it runs. Written where the engine's outputs arrive; one
    event loop.

    guided_tokens: output tokens of the leaders that came from joint steps, as the engine core
    counted them.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.guided_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
