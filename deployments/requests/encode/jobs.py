"""Jobs for encoders: what an engine must compute for a request, and how an answer is made of it.

The ingress makes an EncodeJob of the body (readers.py) and sends it to one replica, where the
outputs become the answer (answers.py). Imports neither ray nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cfg_core.errors import RequestError
from cfg_core.prefill_only.sizes import sizes_of
from cfg_core.prefill_only.types import Input, RequestOptions
from deployments.requests.encode.answers import Wording

_CHARACTERS_PER_TOKEN = 4  # roughly: for the estimate of a job's tokens
_CHARACTERS_PER_WORK = 64
"""Characters that are tokenized in the time in which one token is computed on a CPU, roughly."""


@dataclass(frozen=True, kw_only=True)
class EncodeCall:
    """Inputs that an engine computes with the same options.

    field: the field of the body that held them; errors name it.
    query_field: the field of the first texts, if the inputs are pairs.
    """

    inputs: Sequence[Input]
    options: RequestOptions
    field: str = "input"
    query_field: str | None = None

    @property
    def num_tokens(self) -> int:
        """The estimated number of tokens that are computed: after truncation, with prompts."""
        most, extra = self.options.truncate_to or math.inf, len(self.options.prompt)
        return int(sum(min(most, _estimate(item, extra)) for item in self.inputs))

    @property
    def num_chars(self) -> int:
        """Characters of all inputs, with the prompt in front of each text."""
        return sum(sizes_of(self.inputs, self.options.prompt))


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """One HTTP request: what to compute, and how to make the answer from it."""

    calls: tuple[EncodeCall, ...]
    answer: Wording

    @property
    def num_tokens(self) -> int:
        """The estimated number of tokens of all inputs.

        Replicas are compared by it, and the tenant is charged with it until the job has ended.
        """
        return sum(call.num_tokens for call in self.calls)

    @property
    def work(self) -> int:
        """The estimated work, in tokens: those computed, and the time to tokenize all texts."""
        return self.num_tokens + work_of_text(sum(call.num_chars for call in self.calls))


def work_of_text(num_chars: int) -> int:
    """The work of tokenizing so many characters, in tokens that are computed in that time."""
    return num_chars // _CHARACTERS_PER_WORK


def in_terms_of(call: EncodeCall, error: RequestError) -> RequestError:
    """The engine's error, with the field that the client sent in place of `input`.

    The engine calls every field `input`.
    """
    if error.param != "input" or call.field == "input":
        return error
    return RequestError(f"{call.field}: {error.message}", call.field)


def _estimate(item: Input, prompt_chars: int) -> int:
    if isinstance(item, tuple):
        return sum(_estimate(text, 0) for text in item) + prompt_chars // _CHARACTERS_PER_TOKEN
    if isinstance(item, str):
        return (len(item) + prompt_chars) // _CHARACTERS_PER_TOKEN + 2
    return len(item)
