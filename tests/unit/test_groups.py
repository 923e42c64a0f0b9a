import pytest

from cfg_core.policy.groups import Group, GroupTable, follower_id


def pair(leader, scale):
    return Group(leader, (follower_id(leader, 0),), (scale, 1.0 - scale))


def test_a_group_is_found_by_any_of_its_streams_and_removed_whole():
    table = GroupTable()
    table.add(pair("a", 2.0))
    table.add(Group("b", ("b1", "b2"), (3.0, -1.0, -1.0)))
    table.check_integrity()
    assert len(table) == 2
    assert [g.leader for g in table] == ["a", "b"]
    assert table.of("b2") is table.of("b")
    assert table.is_follower("b1")
    assert not table.is_follower("b")
    assert not table.is_follower("plain")
    assert table.remove("b1").leader == "b"
    assert "b" not in table
    assert "b2" not in table
    assert table.remove("b") is None
    table.check_integrity()


def test_a_stream_belongs_to_one_group_only():
    table = GroupTable()
    table.add(pair("a", 2.0))
    with pytest.raises(AssertionError):
        table.add(Group("x", ("a",), (2.0, -1.0)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t._by_stream.pop("a"),
        lambda t: t._by_stream.pop(follower_id("a", 0)),
        lambda t: t._leaders.clear(),
        lambda t: t._by_stream.update(ghost=Group("ghost", ("g1",), (2.0, -1.0))),
        lambda t: t.add(Group("w", ("w1",), (2.0, 1.0))),
    ],
)
def test_check_integrity_sees_damage(damage):
    table = GroupTable()
    table.add(pair("a", 2.0))
    damage(table)
    with pytest.raises(AssertionError):
        table.check_integrity()
