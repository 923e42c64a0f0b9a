"""An answer that is not streamed goes on elsewhere if its replica is lost, or is to stop.

These tests need no server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cfg_core.errors import EngineDeadError, EngineError
from deployments.messages import OTHER_MODEL, GenerateCall, Heartbeat, Whole
from deployments.replica_client.admitted import AdmittedRequest
from deployments.replica_client.calls import MOST_ADVANCES, GeneratorCalls
from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import Prefix
from deployments.requests.progress import Part, Progress, pack
from deployments.requests.usage import OutputCounts, Usage
from deployments.routing import call_placer
from deployments.routing.call_placer import MODEL, CallPlacer
from tests.serve.parts.test_calls import Items, Scripted, _nothing_is_known

__all__ = ["_nothing_is_known"]

COUNTS = OutputCounts(0, 0, 0, 0, (0, 0, 0, 0.0))
LOST = EngineDeadError("lost")
NUM_RETRIES = 2


def heartbeat(*tokens: int, model: str = "") -> Heartbeat:
    """What a replica tells that has computed these tokens since its last heartbeat."""
    outputs = tuple((Part(0, pack([token])),) for token in tokens)
    return Heartbeat(Usage(output_tokens=9), Progress(outputs, COUNTS, model))


def opened(
    monkeypatch: pytest.MonkeyPatch,
    *scripts: Sequence[Scripted],
    model: str = "model a",
) -> tuple[Any, list[list[int] | None], GeneratorCalls]:
    """What a call is answered by replicas with these scripts, one after the other.

    model: that of a replica that has not failed. Returns also the tokens that each call had.
    """
    monkeypatch.setattr(call_placer, "_placers", {})
    CallPlacer().update("generator", {"other": {"total_blocks": 9, "free_blocks": 9, MODEL: model}})
    handle: Any = SimpleNamespace(options=lambda **_: None, deployment_name="generator")
    calls = GeneratorCalls(handle, NUM_RETRIES)
    had, left = list[list[int] | None](), list(scripts)

    async def begin(call: GenerateCall) -> Items:
        had.append(None if call.begun is None else call.begun.tokens_of(0))
        return Items(*left.pop(0))

    monkeypatch.setattr(calls._direct, "begin", begin)
    place: Any = SimpleNamespace(begun=lambda: None, leave=lambda: None)
    group = GroupRequest(prefixes=(Prefix(num_tokens=9, chain=()),))
    call = GenerateCall(endpoint="chat", body={}, guidance=None, group=group, headers={})
    job: Any = SimpleNamespace(call=call, settle=lambda tokens: None, span=None)
    request = AdmittedRequest(job, place, on_end=lambda _: None)
    return asyncio.run(calls.open(request, None)), had, calls


def test_an_answer_goes_on_behind_what_heartbeats_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, had, calls = opened(
        monkeypatch,
        [Usage(), heartbeat(1, 2, model="model a"), heartbeat(3), LOST],
        [heartbeat(4, model="model a"), LOST],
        [Whole("{}")],
    )
    assert (answer, had) == ("{}", [None, [1, 2, 3], [1, 2, 3, 4]])
    assert (calls.num_retried, calls.num_gone_on) == (2, 2)


def test_an_answer_that_gets_further_is_sent_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times, with all tries after each."""
    tokens = list(range(1, 1 + MOST_ADVANCES))
    further: list[Sequence[Scripted]] = [[heartbeat(n, model="model a"), LOST] for n in tokens]
    last: list[Sequence[Scripted]] = [[LOST]] * (NUM_RETRIES - 1)
    answer, had, _ = opened(monkeypatch, *further, *last, [Whole("{}")])
    assert (answer, had[-1]) == ("{}", tokens)
    again: list[Scripted] = [heartbeat(9, model="model a"), LOST]
    with pytest.raises(EngineDeadError):
        opened(monkeypatch, *further, *last, again)


@pytest.mark.parametrize(
    ("first", "model"),
    [
        ([Usage(), LOST], "model a"),
        ([heartbeat(1, model="model a"), LOST], "model b"),
        ([heartbeat(1, model="model a"), Usage(), LOST], "model a"),
    ],
    ids=["nothing told", "other weights", "told no more"],
)
def test_otherwise_it_starts_over(
    monkeypatch: pytest.MonkeyPatch, first: list[Scripted], model: str
) -> None:
    answer, had, calls = opened(monkeypatch, first, [Whole("{}")], model=model)
    assert (answer, had) == ("{}", [None, None])
    assert (calls.num_retried, calls.num_gone_on) == (1, 0)


def test_it_starts_over_if_the_other_replica_has_other_weights_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, had, _ = opened(
        monkeypatch,
        [heartbeat(1, 2, model="model a"), LOST],
        [EngineError(OTHER_MODEL)],
        [heartbeat(5, model="model b"), Whole("{}")],
    )
    assert (answer, had) == ("{}", [None, [1, 2], None])


def leaving(*tokens: int) -> Heartbeat:
    return replace(heartbeat(*tokens, model="model a"), leaves=True)


def test_an_answer_leaves_a_replica_that_is_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than lost calls are sent again, and without a failure."""
    replicas = [[heartbeat(1, model="model a"), leaving(2)], *([leaving(n)] for n in (3, 4, 5))]
    answer, had, calls = opened(monkeypatch, *replicas, [Whole("{}")])
    assert (answer, had[1:]) == ("{}", [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
    assert (calls.num_left, calls.num_retried) == (4, 0)


@pytest.mark.parametrize("why", ["no room", "other weights", "nothing told"])
def test_an_answer_stays_where_it_is_if_nobody_can_go_on(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no room":
        monkeypatch.setattr(CallPlacer, "has_room", lambda *_: False)
    begun = [] if why == "nothing told" else [leaving(1, 2)]
    model = "model b" if why == "other weights" else "model a"
    first: list[Scripted] = [*begun, leaving(), Whole("{}")]
    answer, had, calls = opened(monkeypatch, first, model=model)
    assert (answer, had, calls.num_left) == ("{}", [None], 0)


def test_an_answer_that_has_left_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, had, calls = opened(
        monkeypatch, [leaving(1)], [heartbeat(2, model="model a"), LOST], [Whole("{}")]
    )
    assert (answer, had) == ("{}", [None, [1], [1, 2]])
    assert (calls.num_left, calls.num_gone_on) == (1, 1)


def test_an_answer_that_has_left_may_meet_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts over, also if no try was left for a replica that is lost."""
    answer, had, calls = opened(
        monkeypatch,
        [LOST],
        [LOST],
        [leaving(1)],
        [EngineError(OTHER_MODEL)],
        [heartbeat(5, model="model b"), Whole("{}")],
    )
    assert (answer, had) == ("{}", [None, None, None, [1], None])
    assert (calls.num_left, calls.num_retried) == (1, 2)
