"""The table of tools/hostile: it reports demands that do not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tools.hostile.attacks.fuzz import complaint, shots
from tools.hostile.attempt import ATTACKS, Reply
from tools.hostile.stage import settled
from tools.hostile.verdict import Calm, Held, Row, Watched
from tools.hostile.watchers import WAITING, Seen
from tools.hostile.wire import is_complete, parsed

MIB = 2**20


def calm() -> Calm:
    calm = Calm()
    calm.add(
        [
            Seen("guided 40", 0.0, 1.0, "right"),
            Seen("/ready", 0.0, 0.1, "right"),
            Seen("guided 40", 0, 9, "429"),
        ]
    )
    return calm


def row_of(*seen: Seen, told: dict[str, int] | None = None, **fields: Any) -> Row:
    held = Held(memory=(100 * MIB, 150 * MIB, 105 * MIB), blocks=(511, 511))
    row = Row(
        attack=ATTACKS["heavy-bodies"],
        took_s=1.0,
        told=told or {"200": 1},
        faults={},
        watched=Watched.of(list(seen), calm()),
        calm_s=1.0,
        held=held,
        deaths=[],
    )
    return replace(row, **fields)


def test_a_row_without_faults_holds() -> None:
    row = row_of(
        Seen("guided 40", 0.0, 2.9, "right"),
        Seen("/ready", 0.0, 0.9, "right"),
        told={"429": 3, "503": 1},
    )
    assert row.complaints() == []
    assert "| held |" in str(row)
    assert row_of(held=Held(memory=(100, 200, 150), again=157, blocks=None)).complaints() == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Seen("guided 40", 0.0, 3.1, "right"), "waited 2.1 s longer"),
        (Seen("guided 40", 0.0, 3.1, WAITING), "waited 2.1 s longer"),
        (Seen("guided 40", 0.0, 0.5, "wrong"), "1 watchers' answers wrong"),
        (Seen("guided 40", 0.0, 0.5, "429"), "1 watchers refused"),
        (Seen("guided 40", 0.0, 0.5, "lost"), "told errors"),
        (Seen("/ready", 0.0, 1.2, "right"), "/ready took 1.2 s"),
    ],
)
def test_what_watchers_see_counts(seen: Seen, words: str) -> None:
    assert words in str(row_of(seen))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"told": {"500": 2}}, "2 requests told 500"),
        ({"told": {"503 (engine lost)": 1}}, "told 503 (engine lost)"),
        ({"told": {"200, then an error event": 1}}, "error event"),
        ({"faults": {"a stream: wrong": 2}}, "2 x a stream: wrong"),
        ({"deaths": ["EngineCore 5 died"]}, "EngineCore 5 died"),
        ({"calm_s": None}, "not calm again"),
        ({"held": Held(memory=(100, 200, 111), blocks=None)}, "memory is 11 % above"),
        (
            {"held": Held(memory=(100, 200, 150), again=159, blocks=None)},
            "memory grew by 6 % when played again",
        ),
        ({"held": Held(memory=None, blocks=(511, 500))}, "500 KV blocks free, 511 before"),
    ],
)
def test_what_the_server_does_counts(fields: dict[str, Any], words: str) -> None:
    assert words in str(row_of(**fields))


def test_who_waits_is_counted_once() -> None:
    waiting, ended = Seen("guided 40", 1.0, 5.0, WAITING), Seen("guided 40", 1.0, 9.0, "right")
    assert settled([waiting, ended]) == [ended]


def test_shots_depend_on_the_seed_and_their_number_alone() -> None:
    assert [*shots(50, 1)] == [*shots(80, 1)][:50]
    assert [*shots(50, 1)] != [*shots(50, 2)]


@pytest.mark.parametrize(
    ("status", "text", "is_wrong"),
    [
        (200, "{}", False),
        (200, "event: error\ndata: {}\n\n", True),
        (400, '{"error": {"message": "m", "type": "t", "param": null, "code": 400}}', False),
        (400, "Bad Request", True),
        (500, '{"error": {"message": "m", "type": "t", "param": null, "code": 500}}', True),
        (503, '{"error": {"message": "busy", "type": "t", "param": null, "code": 503}}', False),
        (
            503,
            (
                '{"error": {"message": "The engine was lost.", "type": "t", "param": null, "code":'
                " 503}}"
            ),
            True,
        ),
        (0, "", True),
    ],
)
def test_what_a_fuzzed_request_may_get(status: int, text: str, is_wrong: bool) -> None:
    (shot,) = shots(1, 0)
    shot = replace(shot, method="POST")
    assert (
        complaint(shot, Reply(status=status, text=text, seconds=0.1, ending="lost")) is not None
    ) == is_wrong


def test_answers_are_read_to_their_end() -> None:
    assert is_complete(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert not is_complete(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok")
    assert is_complete(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
    assert parsed(b"HTTP/1.1 413 Too Large\r\n\r\n", "closed").status == 413
    assert parsed(b"", "reset").kind == "no answer, reset"
