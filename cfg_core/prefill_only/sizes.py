"""How large a request is, in characters, before any of its texts is joined or tokenized. Pure.

A request can be far larger than its body: a prompt goes in front of each input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cfg_core.errors import RequestError
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import Input

TOKEN_CHARS = 4
"""Characters that a token id counts."""


def num_chars(item: Input) -> int:
    """The size of an input in characters, without a prompt."""
    if isinstance(item, tuple):
        return len(item[0]) + len(item[1])
    return len(item) if isinstance(item, str) else TOKEN_CHARS * len(item)


def sizes_of(inputs: Sequence[Input], prompt: str) -> list[int]:
    """The size of each input in characters, with the prompt in front of its text."""
    extra = len(prompt)
    return [num_chars(item) + (extra if isinstance(item, str | tuple) else 0) for item in inputs]


def check_sizes(inputs: Sequence[Input], prompt: str, options: EngineOptions) -> list[int]:
    """`sizes_of`, or a RequestError that names the field that is too large.

    Checks `max_text_chars` of each input, and `max_request_chars` of all together.
    """
    sizes, limit = sizes_of(inputs, prompt), options.max_text_chars
    for index, size in enumerate(sizes):
        if size > limit:
            of_prompt = f" ({len(prompt)} of them are the prompt)" if prompt else ""
            hint = "shorten the prompt" if 2 * len(prompt) > size else "send it in parts"
            raise RequestError(
                f"input {index} has {size} characters{of_prompt}, and this server takes {limit}:"
                f" {hint}.",
                _field(prompt, size, 1),
            )
    if (total := sum(sizes)) > options.max_request_chars:
        raise _too_large(total, len(inputs), prompt, options.max_request_chars)
    return sizes


def _too_large(total: int, num_inputs: int, prompt: str, limit: int) -> RequestError:
    if _field(prompt, total, num_inputs) == "prompt":
        return RequestError(
            f"{len(prompt)} characters of prompt in front of each of {num_inputs} inputs make"
            f" {total} characters, and one request may have {limit}: shorten the prompt, or send"
            " fewer inputs.",
            "prompt",
        )
    return RequestError(
        f"the inputs have {total} characters together, and one request may have {limit}: send"
        " several requests.",
        "input",
    )


def _field(prompt: str, size: int, num_inputs: int) -> str:
    """The field that most of `size` characters come from."""
    return "prompt" if 2 * len(prompt) * num_inputs > size else "input"


def check_num_tokens(num_tokens: int, options: EngineOptions) -> None:
    """Raise RequestError if a request has more than `max_request_tokens` tokens, or at least so."""
    if num_tokens > options.max_request_tokens:
        raise RequestError(
            f"the inputs have {num_tokens} tokens or more, and one request may have"
            f" {options.max_request_tokens}: send several requests.",
            "input",
        )


def slices(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of consecutive inputs.

    A range has at most `most` characters, or it is one longer input.
    """
    first = total = 0
    for place, size in enumerate(sizes):
        if total and total + size > most:
            yield first, place
            first, total = place, 0
        total += size
    yield first, len(sizes)
