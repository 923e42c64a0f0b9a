"""The encoder's room in a step, and what it does to the plan of groups."""

from __future__ import annotations

from cfg_core.policy.lockstep import Headroom, Snapshot, StreamState, Unit, WaitingUnit, plan
from cfg_core.policy.media_budget import MediaBudget, MediaItem, Room

ROOM = Room(16, 16)
ROOMY = Headroom(100, 100, 100)


class NoBlocks:
    """Nothing needs a block."""

    def at_most(self, num_tokens: int) -> int:
        return 0

    def exactly(self, stream: str, num_tokens: int) -> int:
        return 0


def item(name: str, at: int = 3, size: int = 16, compute: int | None = None) -> MediaItem:
    return MediaItem(name, at, size if compute is None else compute, size)


def test_a_stream_stops_before_what_does_not_fit() -> None:
    budget = MediaBudget(ROOM)
    assert budget.reach((item("a"), item("b", at=30)), 50) == 30
    assert budget.reach((item("b", at=5),), 50) == 5
    assert budget.reach((item("b", at=0),), 50) == 0
    assert budget.reach((item("b", at=5),), 5) == 5


def test_equal_items_are_taken_once() -> None:
    budget = MediaBudget(ROOM)
    assert budget.reaches_all([((item("a"),), 9), ((item("a", at=0), item("a", at=4)), 9)])
    assert budget.room == ROOM  # a question takes nothing
    assert not budget.reaches_all([((item("a"),), 9), ((item("b"),), 9)])


def test_what_is_cached_takes_space_and_no_computing() -> None:
    budget = MediaBudget(Room(0, 20))
    assert budget.reach((item("a", compute=0),), 9) == 9
    assert budget.room == Room(0, 4)
    assert budget.reach((item("b", size=4),), 9) == 3


def unit(*streams: StreamState) -> Unit:
    return Unit(streams, guided=True)


def planned(*units: Unit, waiting: tuple[WaitingUnit, ...] = ()) -> frozenset[str]:
    snapshot = Snapshot(units, waiting, 200, ROOMY, free_slots=9, media_room=ROOM)
    return plan(snapshot, NoBlocks()).sampling


def test_a_group_waits_for_the_image_of_one_stream() -> None:
    one, two = (item("a"),), (item("b"),)
    assert not planned(unit(StreamState("l", 9, media=one), StreamState("f", 9, True, two)))
    assert planned(unit(StreamState("l", 9, media=one), StreamState("f", 9, True, one)))
    assert planned(unit(StreamState("l", 9, media=one), StreamState("f", 9, True)))


def test_the_room_goes_to_units_in_order() -> None:
    first = unit(StreamState("l1", 9, media=(item("a"),)), StreamState("f1", 1, True))
    second = unit(StreamState("l2", 9, media=(item("b"),)), StreamState("f2", 1, True))
    text = unit(StreamState("l3", 9), StreamState("f3", 1, True))
    assert planned(first, second, text) == {"l1", "f1", "l3", "f3"}
    plain = Unit((StreamState("p", 9, media=(item("c"),)),))
    assert planned(plain, second) == frozenset()


def test_waiting_groups_sample_at_once_if_the_encoder_has_room() -> None:
    def waiting(name: str, *media: tuple[MediaItem, ...]) -> WaitingUnit:
        return WaitingUnit((f"{name}l", f"{name}f"), (9, 9), True, media)

    one, two = (item("a"),), (item("b"),)
    assert planned(waiting=(waiting("x", one, one), waiting("y", (), ()))) == {
        *("xl", "xf"),
        *("yl", "yf"),
    }
    assert planned(waiting=(waiting("x", one, two), waiting("y", (), ()))) == frozenset()
    assert planned(waiting=(waiting("x", one, ()), waiting("y", two, ()))) == {"xl", "xf"}
