"""Jobs for encoders: what an engine must compute for a request, and how an answer is made of it.

The ingress makes an EncodeJob of the body (readers.py), checks its bounds, and sends it to one
replica, where the outputs become the answer (answer_formats.py). Imports neither ray nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cfg_core.errors import RequestError
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.sizes import check_num_tokens, check_sizes, sizes_of
from cfg_core.prefill_only.types import Input, RequestOptions
from deployments.requests.encode.answer_formats import AnswerFormat

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
    answer: AnswerFormat

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


# --- bounds ---------------------------------------------------------------------------------------


def check_job(job: EncodeJob, options: EngineOptions) -> None:
    """Raise RequestError if a job is larger than the options of its encoder allow.

    A job holds references to the texts of the body. So this costs only additions, and comes before
    any prompt or query is joined with a text. The error names the field that makes most of the
    size. Tokens are counted where they are known, which is in inputs of token ids. The engine
    counts those of texts.
    """
    for call in job.calls:
        _check_queries(call, options.max_request_chars)
        try:
            check_sizes(call.inputs, call.options.prompt, options)
            check_num_tokens(_known_tokens(call), options)
        except RequestError as error:
            raise in_terms_of(call, error) from None


def _check_queries(call: EncodeCall, limit: int) -> None:
    """Raise RequestError if pairs are too large together because of their queries."""
    pairs = [item for item in call.inputs if isinstance(item, tuple)]
    if call.query_field is None or not pairs:
        return
    of_queries, of_documents = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    if of_queries + of_documents > limit and of_queries > of_documents:
        raise RequestError(
            f"{call.query_field} beside each of {len(pairs)} {call.field} makes"
            f" {of_queries + of_documents} characters, and one request may have {limit}: shorten"
            f" {call.query_field}, or send fewer {call.field}.",
            call.query_field,
        )


def _known_tokens(call: EncodeCall) -> int:
    most = call.options.truncate_to
    lengths = (len(item) for item in call.inputs if not isinstance(item, str | tuple))
    return sum(length if most is None else min(most, length) for length in lengths)
