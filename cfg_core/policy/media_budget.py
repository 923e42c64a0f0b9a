"""The room of a step for images, audio and video: which of them a stream's tokens can reach.

vLLM encodes an item in the step that computes the first token of its place. A step may encode only
so many embeddings, and the encoder's cache holds only so many for running streams. A stream whose
next item does not fit stops before it, and goes on in a later step. Pure; lockstep.py uses it to
keep the streams of a group together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class MediaItem(NamedTuple):
    """An image, audio or video that a stream is about to read.

    name: the same for equal items, which are encoded once for all streams.
    at: number of tokens that the stream may compute without it.
    compute: embeddings that must be computed; 0 if the cache has them.
    size: embeddings that its place in the cache takes.
    """

    name: str
    at: int
    compute: int
    size: int


@dataclass(frozen=True, slots=True)
class Room:
    """What a step has for items: embeddings to compute, and free places in the cache."""

    compute: int = 0
    space: int = 0


NO_ROOM = Room()


@dataclass(slots=True)
class MediaBudget:
    """The room of one step, while tokens are granted to streams in order."""

    room: Room
    taken: set[str] = field(default_factory=set)

    def reach(self, items: Sequence[MediaItem], num_tokens: int) -> int:
        """Take the room that a stream needs for its next tokens; return how many it may compute.

        items: those that the stream needs, in the order of their places.
        """
        for item in items:
            if item.at >= num_tokens:
                break
            if item.name in self.taken:
                continue
            compute, space = self.room.compute - item.compute, self.room.space - item.size
            if compute < 0 or space < 0:
                return item.at
            self.room = Room(compute, space)
            self.taken.add(item.name)
        return num_tokens

    def reaches_all(self, streams: Sequence[tuple[Sequence[MediaItem], int]]) -> bool:
        """Whether all these streams, each with its items, could compute so many tokens."""
        trial = MediaBudget(self.room, set(self.taken))
        return all(trial.reach(items, tokens) == tokens for items, tokens in streams)
