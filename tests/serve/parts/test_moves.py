"""How the ingress goes on with a stream whose replica is lost. These tests need no server."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cfg_core.errors import (
    CfgServeError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
)
from deployments.http.text_answers import DONE
from deployments.messages import OTHER_MODEL, Chunk, Whole
from deployments.replica_client import moves, other_replicas
from deployments.replica_client.admitted import AdmittedRequest
from deployments.replica_client.events import events
from deployments.replica_client.moves import MOST_MOVES, MOST_REFUSALS, MovingStream
from deployments.replica_client.other_replicas import OtherReplicas
from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import Prefix
from deployments.requests.progress import Begun, Outputs, Part, Progress, pack
from deployments.requests.usage import OutputCounts
from deployments.routing import call_placer
from deployments.routing.call_placer import MODEL, CallPlacer
from tests.serve.parts.test_calls import Items, Scripted, _nothing_is_known, answer_of

__all__ = ["_nothing_is_known"]

COUNTS = OutputCounts(0, 0, 0, 0, (0, 0, 0, 0.0))
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
        self.begun: list[Begun] = []  # what those were told that took a stream of a lost one
        self.asked: list[Begun] = []  # and of one that leaves
        self.request: Any = SimpleNamespace(answer=None)

    async def from_lost(self, begun: Begun, lost: EngineDeadError) -> Any:
        self.begun.append(begun)
        self.request.answer = answer_of(Items(*self.scripts.pop(0)))
        found = await self.request.answer.next()
        return found.text if isinstance(found, Whole) else found

    async def from_leaving(self, begun: Begun) -> Any:
        if not self.scripts:
            return None
        self.asked.append(begun)
        present, self.request.answer = self.request.answer, answer_of(Items(*self.scripts.pop(0)))
        try:
            return await self.request.answer.next()
        except CfgServeError:
            self.request.answer = present
            raise

    async def told(self) -> list[str]:
        self.request.answer = answer_of(Items(*self.scripts.pop(0)))
        first = await self.request.answer.next()
        stream = MovingStream(self.request, first, self)
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


def test_a_stream_may_be_lost_in_front_of_its_first_token() -> None:
    """Those of /v1/responses have two events before it."""
    replicas = Replicas(
        (replayed(1), LOST),
        (replayed(1), replayed(2), LOST),
        (replayed(1), replayed(2), chunk(3), DONE),
    )
    assert replicas.texts() == ALL
    assert [begun.tokens_of(0) for begun in replicas.begun] == [[], []]


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
        (EngineError(OTHER_MODEL),),
        (),
    ],
    ids=["full", "refused", "whole", "other text", "other weights", "nothing"],
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


# --- a replica that leaves ------------------------------------------------------------------------


def leaving(number: int) -> Chunk:
    return replace(chunk(number), leaves=True)


def test_a_stream_leaves_with_its_replica_and_that_is_no_failure() -> None:
    second: tuple[Scripted, ...] = (replayed(1), replayed(2), chunk(3), DONE)
    replicas = Replicas((chunk(1), leaving(2), chunk(3), DONE), second)
    assert replicas.texts() == ALL
    (begun,) = replicas.asked
    assert begun.tokens_of(0) == [1, 2]
    assert replicas.begun == []


def test_it_may_be_moved_from_one_leaving_replica_to_the_next_however_often() -> None:
    many = 2 * MOST_MOVES
    replicas = Replicas(
        (leaving(1), DONE),
        *[(replace(replayed(1), leaves=True), DONE)] * many,
        (replayed(1), LOST),
        (replayed(1), chunk(2), DONE),
    )
    assert replicas.texts() == [event(1), event(2), DONE]
    assert len(replicas.asked) == many + 1
    assert len(replicas.begun) == 1, "then it may be lost as often as another"


def test_it_ends_where_it_is_if_there_is_no_other_replica() -> None:
    replicas = Replicas((leaving(1), leaving(2), leaving(3), DONE))
    assert replicas.texts() == ALL
    untold = Replicas((replace(chunk(1, told=False), leaves=True), leaving(2), DONE), ())
    assert untold.texts() == [event(1), event(2), DONE]
    assert untold.asked == []


@pytest.mark.parametrize("refusal", [OverloadedError("full"), EngineError(OTHER_MODEL), LOST])
def test_it_ends_where_it_is_if_others_do_not_take_it(
    refusal: CfgServeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "REFUSED_FOR_S", 0.0)
    many = MOST_REFUSALS + 2
    first: tuple[Scripted, ...] = (*map(leaving, range(many)), DONE)
    replicas = Replicas(first, *[(refusal,)] * many)
    assert replicas.texts() == [*map(event, range(many)), DONE]
    assert len(replicas.asked) == MOST_REFUSALS


def test_after_a_refusal_it_waits_before_the_next_try() -> None:
    replicas = Replicas((*map(leaving, range(5)), DONE), *[(OverloadedError("full"),)] * 5)
    assert replicas.texts() == [*map(event, range(5)), DONE]
    assert len(replicas.asked) == 1


def test_if_a_leaving_replica_dies_its_stream_is_moved_as_a_lost_one() -> None:
    replicas = Replicas(
        (leaving(1), LOST), (OverloadedError("full"),), (replayed(1), chunk(2), DONE)
    )
    assert replicas.texts() == [event(1), event(2), DONE]
    assert len(replicas.asked) == len(replicas.begun) == 1


# --- the call to another replica ------------------------------------------------------------------


class Calls:
    """Stands in for GeneratorCalls: opens `script`, or raises it. held: never answers."""

    def __init__(self, *script: Scripted, held: bool = False) -> None:
        self.items, self._held = Items(*script), held
        self.begun: Begun | None = None
        self.may_wait = True

    async def open(self, request: Any, deadline: float | None, may_wait: bool = True) -> Any:
        self.may_wait, self.begun = may_wait, request.begun
        request.answer = answer_of(self.items)
        if self._held:
            await asyncio.sleep(60)
        found = await request.answer.next()
        return found.text if isinstance(found, Whole) else found


BEGUN = Begun(Outputs(((Part(0, pack([1])),),)), COUNTS, "model a")


class Leaving:
    """A request whose replica leaves, and another one that is asked to take its stream.

    model: that of the other replica.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, calls: Calls, model: str = "model a"
    ) -> None:
        monkeypatch.setattr(call_placer, "_placers", {})
        report = {"total_blocks": 100, "free_blocks": 100, "max_num_seqs": 8}
        CallPlacer().update("generator", {"other": {**report, MODEL: model}})
        self.old = Items("data: 2\n\n")
        place: Any = SimpleNamespace(begun=lambda: None, leave=lambda: None)
        group = GroupRequest(prefixes=(Prefix(num_tokens=9, chain=()),))
        job: Any = SimpleNamespace(
            call=SimpleNamespace(group=group), settle=lambda tokens: None, span=None
        )
        self.request = AdmittedRequest(job, place, on_end=lambda _: None)
        self.answer = self.request.answer = answer_of(self.old)
        self.moved: Counter[str] = Counter()
        made: Any = calls
        self.others = OtherReplicas("generator", made, self.request, None, self.moved)


def test_the_answer_of_a_leaving_replica_is_cancelled_once_another_has_taken_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(replayed(1))
    leaving = Leaving(monkeypatch, calls)

    async def main() -> None:
        assert await leaving.others.from_leaving(BEGUN) == replayed(1)

    asyncio.run(main())
    assert leaving.old.cancelled
    assert not calls.items.cancelled
    assert calls.begun is BEGUN
    assert not calls.may_wait
    assert leaving.request.answer is not leaving.answer
    assert leaving.moved == {"drained": 1}


@pytest.mark.parametrize(
    "calls",
    [
        Calls(OverloadedError("full")),
        Calls(EngineError(OTHER_MODEL)),
        Calls(Whole("{}")),
        Calls(held=True),
    ],
    ids=["full", "other weights", "no stream", "slow"],
)
def test_otherwise_the_request_keeps_its_answer(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_replicas, "TAKEN_WITHIN_S", 0.05)
    leaving = Leaving(monkeypatch, calls)

    async def main() -> None:
        with pytest.raises(CfgServeError):
            await leaving.others.from_leaving(BEGUN)

    asyncio.run(main())
    assert leaving.request.answer is leaving.answer
    assert leaving.request.begun is None
    assert not leaving.old.cancelled
    assert not leaving.moved


def test_a_client_that_leaves_meanwhile_cancels_both_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(held=True)
    leaving = Leaving(monkeypatch, calls)

    async def main() -> None:
        task = asyncio.ensure_future(leaving.others.from_leaving(BEGUN))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        leaving.request.end()

    asyncio.run(main())
    assert leaving.old.cancelled
    assert calls.items.cancelled


def test_nobody_is_asked_who_has_other_weights_or_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(replayed(1))
    assert asyncio.run(Leaving(monkeypatch, calls, "model b").others.from_leaving(BEGUN)) is None
    leaving = Leaving(monkeypatch, calls)
    full = {"total_blocks": 100, "free_blocks": 100, "max_num_seqs": 8, "running": 8}
    CallPlacer().update("generator", {"other": {**full, MODEL: "model a"}})
    assert asyncio.run(leaving.others.from_leaving(BEGUN)) is None
    assert calls.begun is None


REPORT = {"total_blocks": 100, "free_blocks": 100, "max_num_seqs": 8, MODEL: "model a"}


@pytest.mark.parametrize("told", [True, False], ids=["it tells its model", "it does not"])
def test_a_lost_stream_waits_until_a_replica_that_has_just_started_tells_its_model(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines that were known are gone. 200 kills in a row met this moment three times."""
    monkeypatch.setattr(other_replicas, "TOLD_WITHIN_S", 0.2)
    leaving = Leaving(monkeypatch, Calls(replayed(1)))
    placer = CallPlacer()
    placer.update("generator", {"new": {}})

    async def main() -> Any:
        move = asyncio.ensure_future(leaving.others.from_lost(BEGUN, LOST))
        await asyncio.sleep(0.1)
        assert not move.done()
        if told:
            placer.update("generator", {"new": REPORT})
        return await move

    if told:
        assert asyncio.run(main()) == replayed(1)
        assert leaving.moved == {"lost": 1}
    else:
        with pytest.raises(EngineDeadError):
            asyncio.run(main())


def test_a_lost_stream_does_not_wait_if_no_replica_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaving = Leaving(monkeypatch, Calls(replayed(1)))
    CallPlacer().update("generator", {})

    async def main() -> None:
        async with asyncio.timeout(1):
            with pytest.raises(EngineDeadError):
                await leaving.others.from_lost(BEGUN, LOST)

    asyncio.run(main())
