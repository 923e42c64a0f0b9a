"""A stream whose replica is lost goes on on another one, and its client does not notice.

Until then, the ingress keeps what the replica tells with each chunk (requests/progress.py). The
other replica words the events again from the beginning. Those that the client has are dropped, by
number, and checked by their text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from cfg_core.errors import CfgServeError, EngineDeadError
from deployments.messages import LOST, Chunk, Whole
from deployments.replica_client.answers import Answer
from deployments.requests.progress import Begun, Told, Unseen

MOST_MOVES = 5
"""How often one stream is moved."""

Move: TypeAlias = Callable[[Begun, EngineDeadError], Awaitable[Chunk | str]]
"""Sends the call of a stream to another replica, and is told how the last one was lost. Returns the
first item of its answer, which the request has from then on. Raises CfgServeError."""


class HasAnswer(Protocol):
    """A request, with the answer of the replica that has it now."""

    answer: Answer | None


class MovingStream:
    """The chunks of one stream, whichever replicas they come from. Read as an Answer.

    first: its first chunk, which the client gets before any other.
    checks_texts: see `Told`.
    """

    def __init__(
        self, request: HasAnswer, first: Chunk, move: Move, checks_texts: bool = True
    ) -> None:
        self._request, self._move = request, move
        self._told = Told(checks_texts)
        self._told.note(first.text, first.progress)
        self._unseen: Unseen | None = None
        self._moves = 0

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
            try:
                chunk = await self._answer.next()
            except (EngineDeadError, StopAsyncIteration) as error:
                lost = error if isinstance(error, EngineDeadError) else EngineDeadError(LOST)
                chunk = await self._moved(lost)
            text = self._new_text(chunk)
            self._told.note(text, chunk.progress if isinstance(chunk, Chunk) else None)
            if text:
                return Chunk(text)

    async def _moved(self, lost: EngineDeadError) -> Chunk:
        """The first chunk of another replica. Raises `lost` if the stream cannot be moved."""
        begun = self._told.begun()
        if begun is None or self._moves == MOST_MOVES:
            raise lost
        self._moves += 1
        self._unseen = self._told.unseen()
        first = await self._move(begun, lost)
        if not isinstance(first, Chunk):
            raise lost
        return first

    def _new_text(self, chunk: Chunk | Whole) -> str:
        if self._unseen is None:
            return chunk.text
        try:
            return self._unseen.of(chunk.text)
        except ValueError:
            raise EngineDeadError(LOST) from None
