"""TokenIds: the token ids of a prompt, checked once and then carried as bytes.

A list of 100,000 integers costs milliseconds each time it is copied, pickled or walked. Their bytes
cost microseconds.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

MOST = 2**32
"""Token ids are below this number. No vocabulary is as large."""

_SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenIds(Sequence[int]):
    """Token ids as a compact tuple: it is equal to the tuple of the same ids.

    packed: four bytes for each id, in the order of this machine.
    """

    packed: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        """Pack ids that are known to be integers in [0, MOST), such as those of a tokenizer."""
        return ids if isinstance(ids, cls) else cls(array("I", ids).tobytes())

    @classmethod
    def checked(cls, ids: Sequence[object]) -> TokenIds | None:
        """Pack ids that a caller gave; None unless all are integers in [0, MOST).

        It has no loop in Python, so that 100,000 ids take two milliseconds.
        """
        if operator.countOf(map(type, ids), int) != len(ids):
            return None
        try:
            return cls(array("I", ids).tobytes())  # type: ignore[type-var]
        except OverflowError:
            return None

    def tolist(self) -> list[int]:
        return self._view.tolist()

    @property
    def _view(self) -> memoryview[int]:
        return memoryview(self.packed).cast("I")

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(self._view)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> TokenIds: ...

    def __getitem__(self, place: int | slice) -> int | TokenIds:
        found = self._view[place]
        return found if isinstance(found, int) else TokenIds(found.tobytes())

    def __add__(self, other: TokenIds) -> TokenIds:
        return TokenIds(self.packed + other.packed)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:_SHOWN]))
        return f"TokenIds({shown}{', ...' if len(self) > _SHOWN else ''}; {len(self)})"
