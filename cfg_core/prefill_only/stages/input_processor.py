"""Turns a caller's inputs into sequences, or raises an error that names the wrong input.

An input is truncated only if the request asks for it. Truncation keeps the special tokens at both
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.models.late_interaction import LateInteraction
from cfg_core.prefill_only.models.pair_template import PairTemplate
from cfg_core.prefill_only.stages.pair_prompts import encode_pairs
from cfg_core.prefill_only.stages.tokenizer import Tokenizer
from cfg_core.prefill_only.types import Input, RequestOptions, SequenceState


class InputProcessor:
    """Checks and tokenizes inputs. Thread-safe: it holds no state of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        *,
        skips_prompt: bool,
        template: PairTemplate | None = None,
        late: LateInteraction | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._skips_prompt = skips_prompt
        self._template = template
        self._late = late

    def check_options(self, options: RequestOptions) -> None:
        """Raise RequestError if the model cannot do what is asked, whatever the inputs are."""
        for task in options.tasks:
            if task not in self._info.tasks:
                raise RequestError(
                    f"this model does not compute {task}: it computes"
                    f" {', '.join(self._info.tasks)}.",
                    "task",
                )
        if options.dimensions is not None:
            self._info.check_dimensions(options.dimensions)
        if (
            options.truncate_to is not None
            and not 1 <= options.truncate_to <= self._info.max_input_tokens
        ):
            raise RequestError(
                f"truncation to {options.truncate_to} tokens is not possible: this model takes 1 to"
                f" {self._info.max_input_tokens}.",
                "truncate_prompt_tokens",
            )

    def process(
        self,
        inputs: Sequence[Input],
        options: RequestOptions,
        *,
        first_index: int = 0,
    ) -> list[SequenceState]:
        """A sequence for each input, in order.

        first_index: index of the first of `inputs` in its request, for errors and sequences.

        Raises RequestError, which names the index of a bad input.
        """
        for index, item in enumerate(inputs, first_index):
            self._check_shape(item, index)
        encodings = iter(self._encoded(inputs, options, first_index))
        prompt_length = self._prompt_length(options.prompt)
        return [
            self._sequence(item, encodings, options, index, prompt_length)
            for index, item in enumerate(inputs, first_index)
        ]

    def _encoded(
        self, inputs: Sequence[Input], options: RequestOptions, first_index: int
    ) -> Sequence[Any]:
        """The encodings of the inputs that are texts or pairs."""
        if self._template is not None:
            pairs = [
                (self._part(item[0], options, index), self._part(item[1], options, index))
                for index, item in enumerate(inputs, first_index)
                if isinstance(item, tuple)
            ]
            return encode_pairs(self._tokenizer, self._template, pairs, options.prompt)
        texts = [
            self._text(item, options, index)
            for index, item in enumerate(inputs, first_index)
            if isinstance(item, str | tuple)
        ]
        return self._tokenizer.encode(texts) if texts else ()

    def _text(
        self, item: str | tuple[str, str], options: RequestOptions, index: int
    ) -> str | tuple[str, str]:
        """The text to tokenize, with the prompt in front."""
        if isinstance(item, str):
            return self._part(options.prompt + item, options, index)
        query, document = item
        return (
            self._part(options.prompt + query, options, index),
            self._part(document, options, index),
        )

    def _part(self, text: str, options: RequestOptions, index: int) -> str:
        """The text, or of one that is far too long a part that holds all tokens that are kept."""
        limit = self._limit(options)
        part = self._tokenizer.excerpt(text, limit, options.truncation_side)
        if part is not None and options.truncate_to is None:
            raise self._too_long(index, f"more than {limit}", limit)
        return text if part is None else part

    def _sequence(
        self,
        item: Input,
        encodings: Any,
        options: RequestOptions,
        index: int,
        prompt_length: int,
    ) -> SequenceState:
        if isinstance(item, str | tuple):
            encoding = next(encodings)
            ids, types, mask = encoding.ids, encoding.type_ids, encoding.special_tokens_mask
        else:
            ids, types = list(item), None
            mask = [int(token in self._tokenizer.special_ids) for token in ids]
        limit = self._limit(options)
        if len(ids) > limit:
            if options.truncate_to is None:
                raise self._too_long(index, str(len(ids)), limit)
            if self._template is not None and isinstance(item, tuple) and sum(mask) >= limit:
                raise RequestError(
                    f"input {index} has {sum(mask)} tokens without its document, and {limit} are"
                    " to be kept: shorten the query or the instruction.",
                    "input",
                )
            kept = truncated(mask, limit, options.truncation_side)
            ids, types = [ids[i] for i in kept], types and [types[i] for i in kept]
        if not ids:
            raise RequestError(f"input {index} has no tokens: send text.", "input")
        num_more = self._num_fillers(len(ids), options)
        if num_more:
            assert self._late is not None
            ids = [*ids, *[self._late.expansion_id] * num_more]
            types = types and [*types, *[0] * num_more]
        return SequenceState(
            token_ids=ids,
            token_type_ids=types if types and any(types) else None,
            options=options,
            index=index,
            prompt_length=prompt_length,
            num_unseen=0 if self._late is None or self._late.attend else num_more,
        )

    def _num_fillers(self, num_tokens: int, options: RequestOptions) -> int:
        """How many tokens a query of late interaction is filled up with."""
        if self._late is None or options.role != "query":
            return 0
        return max(0, self._late.expanded_length - num_tokens)

    def _limit(self, options: RequestOptions) -> int:
        """Tokens of the longest input, after truncation."""
        limit = options.truncate_to or self._info.max_input_tokens
        of_role = self._late.limit(options.role) if self._late is not None else None
        return limit if of_role is None else min(limit, of_role)

    def _check_shape(self, item: Input, index: int) -> None:
        fault = _fault(item, self._info.vocab_size)
        if fault is None and isinstance(item, str) and self._template is not None:
            fault = "is a single text, and this reranker scores pairs: send a query and a document."
        if fault is not None:
            raise RequestError(f"input {index} {fault}", "input")

    def _too_long(self, index: int, length: str, limit: int) -> RequestError:
        return RequestError(
            f"input {index} has {length} tokens and this model takes {limit}: shorten it, or ask"
            " for truncation (truncate_prompt_tokens: -1 over HTTP, truncate=True in Python).",
            "input",
        )

    def _prompt_length(self, prompt: str) -> int:
        """Number of tokens that pooling leaves out: those of the prompt, if it is not pooled.

        The leading special tokens count, too, as in sentence-transformers.
        """
        if not prompt or not self._skips_prompt:
            return 0
        encoding = self._tokenizer.encode([prompt])[0]
        return len(encoding.ids) - _num_trailing(encoding.special_tokens_mask)


def _fault(item: Input, vocab_size: int) -> str | None:
    """What is wrong with an input, or None."""
    if isinstance(item, str):
        return None if item else "is empty: send text."
    if isinstance(item, tuple):
        texts = len(item) == 2 and all(isinstance(text, str) and text for text in item)
        return None if texts else "must be a pair of two texts, neither empty."
    if not item:
        return "has no tokens: send at least one token id."
    for token in item:
        if isinstance(token, bool) or not isinstance(token, int):
            return f"holds {token!r}: token ids are whole numbers."
        if not 0 <= token < vocab_size:
            return f"holds the token id {token}: this model knows 0 to {vocab_size - 1}."
    return None


def truncated(special_mask: Sequence[int], limit: int, side: str) -> list[int]:
    """Indices of the `limit` tokens that are kept.

    special_mask: for each token, 1 if it is special, else 0.

    side: the side from which the text is cut. The special tokens at both ends stay.

    If there are more special tokens than `limit`, the trailing ones are kept first, because
    last-token pooling reads them.
    """
    length = len(special_mask)
    head, tail = _num_leading(special_mask), _num_trailing(special_mask)
    if head + tail >= limit:
        head = max(0, limit - tail)
        tail = limit - head
    middle = list(range(head, length - tail))
    room = limit - head - tail
    kept = middle[:room] if side == "right" else middle[len(middle) - room :]
    return [*range(head), *kept, *range(length - tail, length)]


def _num_leading(mask: Sequence[int]) -> int:
    return next((i for i, special in enumerate(mask) if not special), len(mask))


def _num_trailing(mask: Sequence[int]) -> int:
    return 0 if all(mask) else next(i for i, special in enumerate(reversed(mask)) if not special)
