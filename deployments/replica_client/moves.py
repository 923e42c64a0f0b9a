"""A stream whose replica is lost or leaves goes on on another one, and its client does not notice.

Until then, the ingress keeps what the replica tells with each chunk (requests/progress.py). The
other replica words the events again from the beginning. Those that the client has are dropped, by
number, and checked by their text.

A replica that is lost can do no more for the stream. One that leaves
(generator/moving/drain.py) goes on with it until another one has taken it, and to its end if none
does.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from cfg_core.errors import CfgServeError, EngineDeadError, EngineError
from deployments.messages import LOST, Chunk, Whole
from deployments.replica_client.answers import Answer
from deployments.requests.progress import Begun, Told, Unseen

MOST_MOVES = 5
"""How often one stream is moved because its replica was lost."""

MOST_REFUSALS = 3
"""How often other replicas may fail to take a stream from one that leaves, before it stays."""

REFUSED_FOR_S = 1.0
"""Seconds after such a failure before the next try."""


class HasAnswer(Protocol):
    """A request, with the answer of the replica that has it now."""

    answer: Answer | None


class Moves(Protocol):
    """Sends the call of one stream to another replica.

    Both return the first item of its answer, which the request has from then on.
    """

    async def from_lost(self, begun: Begun, lost: EngineDeadError) -> Chunk | str:
        """Move it from a replica that is lost. Raises CfgServeError: `lost` if there is none."""

    async def from_leaving(self, begun: Begun) -> Chunk | None:
        """Move it from a replica that leaves; None if there is no other.

        Raises CfgServeError if another one does not take it. In both cases, the request keeps the
        answer that it has.
        """


class MovingStream:
    """The chunks of one stream, whichever replicas they come from. Read as an Answer.

    first: its first chunk, which the client gets before any other.
    checks_texts: see `Told`.
    """

    def __init__(
        self, request: HasAnswer, first: Chunk, moves: Moves, checks_texts: bool = True
    ) -> None:
        self._request, self._to_others = request, moves
        self._told = Told(checks_texts)
        self._told.note(first.text, first.progress)
        self._unseen: Unseen | None = None
        self._moves = self._refusals = 0
        self._stays_until = -math.inf  # by time.monotonic, after a refusal
        self._leaves = first.leaves

    @property
    def _answer(self) -> Answer:
        """That of the replica that has the stream now."""
        assert self._request.answer is not None
        return self._request.answer

    @property
    def is_complete(self) -> bool:
        return self._answer.is_complete

    @is_complete.setter
    def is_complete(self, value: bool) -> None:
        self._answer.is_complete = value

    @property
    def failure(self) -> CfgServeError | None:
        return self._answer.failure

    @failure.setter
    def failure(self, error: CfgServeError | None) -> None:
        self._answer.failure = error

    async def next(self) -> Chunk:
        """The next chunk that has an event which the client has not.

        Raises CfgServeError if the stream cannot go on.
        """
        while True:
            chunk = await self._of_another() or await self._of_the_same()
            self._leaves = isinstance(chunk, Chunk) and chunk.leaves
            text = self._new_text(chunk)
            self._told.note(text, chunk.progress if isinstance(chunk, Chunk) else None)
            if text:
                return Chunk(text)

    async def _of_the_same(self) -> Chunk | Whole:
        """The next chunk of the replica that has the stream, or of another one if it is lost."""
        try:
            return await self._answer.next()
        except (EngineDeadError, StopAsyncIteration) as error:
            lost = error if isinstance(error, EngineDeadError) else EngineDeadError(LOST)
            return await self._moved(lost)

    async def _moved(self, lost: EngineDeadError) -> Chunk:
        """The first chunk of another replica. Raises `lost` if the stream cannot be moved."""
        begun = self._told.begun()
        if begun is None or self._moves == MOST_MOVES:
            raise lost
        self._moves += 1
        self._unseen = self._told.unseen()
        try:
            first = await self._to_others.from_lost(begun, lost)
        except EngineError:  # lost as well, or it has other weights
            raise lost from None
        if not isinstance(first, Chunk):
            raise lost
        return first

    async def _of_another(self) -> Chunk | None:
        """The first chunk of another replica, if the one that has the stream leaves."""
        if not self._leaves or self._refusals == MOST_REFUSALS:
            return None
        begun = self._told.begun() if time.monotonic() >= self._stays_until else None
        if begun is None:
            return None
        try:
            first = await self._to_others.from_leaving(begun)
        except CfgServeError:
            self._refusals += 1
            self._stays_until = time.monotonic() + REFUSED_FOR_S
            return None
        if first is not None:
            self._refusals = 0
            self._unseen = self._told.unseen()
        return first

    def _new_text(self, chunk: Chunk | Whole) -> str:
        if self._unseen is None:
            return chunk.text
        try:
            return self._unseen.of(chunk.text)
        except ValueError:
            raise EngineDeadError(LOST) from None
