"""Which output tokens are guided, and with what weights."""

from cfg_core.params.timeline import Timeline

PAIR = (1.5, -0.5)


def of(start=0, end=None, *changes):
    return Timeline(((0, PAIR), *changes), start, end)


def test_a_window_holds_from_its_start_to_before_its_end():
    window = of(3, 5)
    assert [token for token in range(10) if window.guides(token)] == [3, 4]
    assert [token for token in range(10) if window.is_over(token)] == [5, 6, 7, 8, 9]
    assert [window.next_change(token) for token in (0, 2, 3, 4, 5, 9)] == [3, 3, 5, 5, None, None]


def test_without_an_end_it_is_never_over():
    assert of(3).guides(10**6)
    assert not of(3).is_over(10**6)
    assert of(3).next_change(3) is None


def test_each_scale_holds_from_its_token_on():
    schedule = of(0, None, (2, (3.0, -2.0)), (6, (0.0, 1.0)))
    assert [schedule.weights_at(token)[0] for token in range(8)] == [1.5] * 2 + [3.0] * 4 + [
        0.0
    ] * 2
    assert [schedule.next_change(token) for token in (0, 1, 2, 6)] == [2, 2, 6, None]


def test_changes_behind_the_end_are_none():
    both = of(1, 4, (2, (3.0, -2.0)), (6, (0.0, 1.0)))
    assert [both.next_change(token) for token in range(5)] == [1, 2, 4, 4, None]
