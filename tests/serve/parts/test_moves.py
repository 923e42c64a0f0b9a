"""How the ingress goes on with a stream whose replica is lost. These tests need no server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cfg_core.errors import EngineDeadError, OverloadedError, RequestError
from deployments.http.text_answers import DONE
from deployments.messages import Chunk, Whole
from deployments.replica_client.events import events
from deployments.replica_client.moves import MOST_MOVES, MovingStream
from deployments.requests.progress import Begun, Part, Progress, pack
from deployments.requests.usage import Counts
from tests.serve.parts.test_calls import Items, Scripted, _nothing_is_known, answer_of

__all__ = ["_nothing_is_known"]

COUNTS = Counts(0, 0, 0, 0, (0, 0, 0, 0.0))
LOST = EngineDeadError("lost")


def event(number: int) -> str:
    return f"data: {number}\n\n"


def chunk(number: int, told: bool = True) -> Chunk:
    """The chunk with an event, and the token behind it."""
    progress = Progress(((Part(0, pack([number])),),), COUNTS) if told else None
    return Chunk(event(number), progress=progress)


def replayed(number: int) -> Chunk:
    return Chunk(event(number), progress=Progress((), COUNTS))


class Replicas:
    """Answers of one replica after the other, and what each was told."""

    def __init__(self, *scripts: tuple[Scripted, ...]) -> None:
        self.scripts = list(scripts)
        self.begun: list[Begun] = []
        self.request: Any = SimpleNamespace(answer=None)

    async def move(self, begun: Begun, lost: EngineDeadError) -> Any:
        self.begun.append(begun)
        self.request.answer = answer_of(Items(*self.scripts.pop(0)))
        found = await self.request.answer.next()
        return found.text if isinstance(found, Whole) else found

    async def told(self) -> list[str]:
        self.request.answer = answer_of(Items(*self.scripts.pop(0)))
        first = await self.request.answer.next()
        stream = MovingStream(self.request, first, self.move)
        return [text async for text in events(stream, first)]

    def texts(self) -> list[str]:
        return asyncio.run(self.told())


ALL = [event(1), event(2), event(3), DONE]


@pytest.mark.parametrize("lost", [(LOST,), ()], ids=["told", "ended"])
@pytest.mark.parametrize("seen", [1, 2, 3])
def test_the_client_gets_each_event_once(seen: int, lost: tuple[Scripted, ...]) -> None:
    first = (*(chunk(i) for i in range(1, seen + 1)), *lost)
    second: tuple[Scripted, ...] = (
        *(replayed(i) for i in range(1, seen + 1)),
        *map(chunk, range(seen + 1, 4)),
        DONE,
    )
    replicas = Replicas(first, second)
    assert replicas.texts() == ALL
    (begun,) = replicas.begun
    assert begun.tokens_of(0) == list(range(1, seen + 1))
    assert replicas.request.answer.is_complete
    assert replicas.request.answer.failure is None


def test_a_stream_may_be_moved_again_also_while_it_is_worded_again() -> None:
    replicas = Replicas(
        (chunk(1), chunk(2), LOST),
        (replayed(1), LOST),
        (replayed(1), replayed(2), chunk(3), LOST),
        (Chunk(event(1) + event(2), progress=Progress((), COUNTS)), replayed(3), DONE),
    )
    assert replicas.texts() == ALL
    assert [begun.tokens_of(0) for begun in replicas.begun] == [[1, 2], [1, 2], [1, 2, 3]]


def test_it_is_moved_so_often_and_no_more() -> None:
    replicas = Replicas((chunk(1), LOST), *[(replayed(1), LOST)] * (MOST_MOVES + 1))
    assert replicas.texts()[0] == event(1)
    assert len(replicas.begun) == MOST_MOVES
    assert replicas.request.answer.failure is not None


@pytest.mark.parametrize(
    "second",
    [
        (OverloadedError("full"),),
        (RequestError("no"),),
        (Whole("{}"),),
        (Chunk(event(7)), DONE),
        (),
    ],
    ids=["full", "refused", "whole", "other text", "nothing"],
)
def test_if_no_replica_can_go_on_the_stream_ends_with_an_error(
    second: tuple[Scripted, ...],
) -> None:
    *texts, last = Replicas((chunk(1), LOST), second).texts()
    assert texts == [event(1)]
    assert last.startswith("event: error")


def test_a_stream_of_which_nothing_is_told_ends_with_an_error_as_before() -> None:
    replicas = Replicas((chunk(1, told=False), LOST))
    *texts, last = replicas.texts()
    assert texts == [event(1)]
    assert last.startswith("event: error")
    assert replicas.begun == []


def test_other_errors_are_not_a_reason_to_move() -> None:
    replicas = Replicas((chunk(1), RequestError("too slow")))
    assert replicas.texts()[-1].startswith("event: error")
    assert replicas.begun == []
