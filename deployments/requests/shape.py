"""What a body may cost, from its shape: how much each of its fields holds.

The shape is read from the bytes before they are parsed, by array code that does not hold the
interpreter, one piece at a time. So a body that would cost too much is refused before anything is
made of it. Every route that reads a body checks the first bound. Routes that copy fields check the
second one, too:

1. All fields of a body together hold at most `max_values` objects, lists and texts. Numbers in
   lists are cheap, because token ids are read by array code later: 32 count as one value.
2. A field that is copied, for each choice or each input, holds at most `max_copied_entries` entries
   and `max_copied_bytes` bytes, times the number of copies. WEIGHTS makes what is read slowly
   dearer.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cfg_core.errors import RequestError
from cfg_core.params.fields import CHAT_FIELDS, SYNONYMS

READ_ONCE = frozenset(
    {
        *("messages", "input", "system", "instructions", *CHAT_FIELDS, *SYNONYMS),
        *("prompt", "prompt_embeds", "suffix", "query", "items", "tokens", "tools", "documents"),
        *("chat_template", "chat_template_kwargs"),
        *("metadata", "media_io_kwargs", "mm_processor_kwargs"),
        # grammars, whose bounds are those of the section `grammars:`
        *("response_format", "structured_outputs", "text", "output_config", "tool_choice"),
    }
)
"""Fields of requests for text that are read once, however many choices there are.

All others become parameters of sampling, which vLLM sends to the engine with each choice.
"""

WEIGHTS: Mapping[str, tuple[int, int]] = {
    "bad_words": (200, 400),  # tokenized on the event loop, and compared in each step
    "stop_token_ids": (4, 1),  # searched for each token
    "logit_bias": (4, 1),  # becomes dictionaries and lists, again when the batch changes
}
"""How many entries and bytes of other fields one entry and one byte of a field cost.

An entry of other fields costs about 0.3 microseconds for each copy, mostly in the engine's steps,
and a byte 6 nanoseconds.
"""

NUMBERS_PER_VALUE = 32
"""So many entries of lists cost as much as one object, list or text."""

_QUOTE, _COLON, _COMMA = b'":,'
_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1
_PIECE_BYTES = 1 << 20
_MOST_FIELDS = 1024
_NAME_BYTES = 300


@dataclass(frozen=True, slots=True)
class FieldSize:
    """How much a field holds.

    num_bytes: bytes of its JSON text, with what stands between it and the next field.
    values: objects, lists and texts. The names of an object's entries are texts.
    entries: of all lists and objects. An empty one counts as one entry.
    """

    num_bytes: int = 0
    values: int = 0
    entries: int = 0

    @property
    def cost(self) -> int:
        """What it costs to read, in values."""
        return self.values + self.entries // NUMBERS_PER_VALUE

    def __add__(self, other: FieldSize) -> FieldSize:
        return FieldSize(
            self.num_bytes + other.num_bytes,
            self.values + other.values,
            self.entries + other.entries,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a body.

    fields: by the names of the fields as the body writes them. What stands before the first field,
        and all of a body that is no object, has the empty name.
    depth: how deeply objects and lists are nested.
    """

    fields: Mapping[str, FieldSize] = field(default_factory=dict)
    depth: int = 0

    @property
    def size(self) -> FieldSize:
        return sum(self.fields.values(), FieldSize())


def shape_of(raw: bytes) -> Shape:
    """The shape of JSON text in UTF-8. It takes at most about 10 ms per MiB.

    Never raises. Malformed JSON has some shape, and its size is never more than that of the text.
    """
    text = raw
    if b"\\" in raw:
        text = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    fields: dict[str, FieldSize] = {}
    name, depth, deepest, is_text = "", 0, 0, False
    for start in range(0, len(text), _PIECE_BYTES):
        piece = _Piece(text[start : start + _PIECE_BYTES], depth, is_text)
        found = fields[name] = fields.get(name, FieldSize())
        for at, size in piece.parts(_MOST_FIELDS - len(fields)):
            if at is not None:
                name = _name_before(text, start + at)
                found = fields.get(name, FieldSize())
            fields[name] = found + size
        depth, is_text = piece.depth, piece.ends_in_text
        deepest = max(deepest, piece.deepest)
    return Shape(fields, deepest)


class _Piece:
    """A piece of JSON text without escaped quotes.

    What is read by array code is its skeleton: the piece with a single quote for each text in it.
    A text that began before the piece has none.

    depth: how many objects and lists are open where it begins, and later, where it ends.
    is_text: whether it begins inside a text.
    """

    def __init__(self, piece: bytes, depth: int, is_text: bool) -> None:
        parts = piece.split(b'"')
        self._texts, others = parts[1 - is_text :: 2], parts[is_text::2]
        self.ends_in_text = (len(parts) % 2 == 0) != is_text
        self._unclosed = int(self.ends_in_text and bool(others))
        skeleton = b'"'.join(others) + b'"' * self._unclosed
        # of the text that it begins with, the skeleton has nothing
        self._skipped = len(self._texts.pop(0)) + bool(others) if is_text else 0
        self._codes: NDArray[np.uint8] = np.frombuffer(skeleton, np.uint8)
        self._steps = _STEPS[self._codes]
        depths = np.cumsum(self._steps, dtype=np.int32) + np.int32(depth)
        self._colons = np.flatnonzero((self._codes == _COLON) & (depths == 1))
        self.deepest = int(depths.max(initial=depth))
        self.depth = int(depths[-1]) if len(depths) else depth

    def parts(self, most: int) -> Iterator[tuple[int | None, FieldSize]]:
        """What stands before the first colon of a field of the body itself, and after each.

        Yields where the colon is in the piece, and the size of the part. After `most` colons, the
        rest is one part.
        """
        colons = self._colons[: max(0, most)].tolist()
        texts, place = iter(self._texts), 0
        edges = [0, *colons, len(self._codes)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            codes, steps = self._codes[begin:end], self._steps[begin:end]
            quotes = int(np.count_nonzero(codes == _QUOTE))
            opened = int(np.count_nonzero(steps > 0))
            commas = int(np.count_nonzero(codes == _COMMA))
            length = end - begin + quotes + sum(map(len, islice(texts, quotes)))
            length += (0 if number else self._skipped) - (
                self._unclosed if number == len(colons) else 0
            )
            yield place if number else None, FieldSize(length, quotes + opened, commas + opened)
            place += length


def _name_before(text: bytes, colon: int) -> str:
    """The name in front of a colon; an unusually long one only in part."""
    before = text[max(0, colon - _NAME_BYTES) : colon]
    name = before.rpartition(b'"')[0].rpartition(b'"')[2]
    return name.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class ShapeBounds:
    """Upper bounds on the shape of a body. Each field is a key of the section `limits:`."""

    max_values: int = field(default=2**16, metadata={"ge": 1024})
    """Maximum number of objects, lists and texts in a request body. The names of an object's
    entries are texts, too, so a message with a role and a content counts as five. 32 numbers in
    lists, such as token ids, count as one. A request with more gets 400 before it is parsed.
    """

    max_copied_entries: int = field(default=1_000_000, metadata={"ge": 1024})
    """Maximum number of entries of one field, such as `allowed_token_ids`, times the choices (`n`
    times the prompts) that each get a copy of it. An entry of `stop_token_ids` or `logit_bias`
    counts as 4, and one of `bad_words` as 200. A request with more gets 400.
    """

    max_copied_bytes: int = field(default=32 * 2**20, metadata={"ge": 2**16})
    """Maximum size, in bytes of JSON text, of one such field, times the choices that each get a
    copy of it. A byte of `bad_words` counts as 400. A request with more gets 400.
    """

    def check_values(self, shape: Shape) -> None:
        """Raise RequestError if all fields together hold too many objects, lists and texts."""
        if shape.size.cost > self.max_values:
            name = max(shape.fields, key=lambda name: shape.fields[name].cost)
            found = shape.fields[name]
            raise RequestError(
                f"{shown(name)} holds {found.values} objects, lists and texts, and {found.entries}"
                f" entries: all fields of a body together may hold {self.max_values} objects, lists"
                f" and texts, where {NUMBERS_PER_VALUE} entries count as one. Send less in one"
                f" request. {_raise('max_values')}",
                name or None,
            )

    def check_copies(self, shape: Shape, copies: int, of: str, but: Iterable[str] = ()) -> None:
        """Raise RequestError if a field is too large to be copied so many times.

        copies: number of copies of each field.
        of: what has a copy each, in the plural, for the error.
        but: fields that are not copied.
        """
        for name in shape.fields.keys() - {"", *but}:
            self.check_field(name, shape.fields[name], copies, of)

    def check_field(self, name: str, size: FieldSize, copies: int, of: str) -> None:
        """Raise RequestError if one field is too large to be copied so many times."""
        per_entry, per_byte = WEIGHTS.get(name, (1, 1))
        for found, weight, most, what, key in (
            (size.entries, per_entry, self.max_copied_entries, "entries", "max_copied_entries"),
            (size.num_bytes, per_byte, self.max_copied_bytes, "bytes", "max_copied_bytes"),
        ):
            if found * weight * copies > most:
                raise RequestError(
                    f"{shown(name)} has {found} {what}, and this request copies them to"
                    f" {copies} {of}: at most {most // weight} are allowed in all copies together."
                    f" Send fewer {what}, or ask for fewer {of}. {_raise(key)}",
                    name,
                )


def shown(name: str) -> str:
    """A field's name for an error."""
    return name[:100] or "The body"


def _raise(key: str) -> str:
    return f"The operator can raise `limits.{key}`."


def number_of(value: Any) -> int:
    """A count in a body, for checks before the count itself is checked: at least 1."""
    return max(1, value) if type(value) is int else 1
