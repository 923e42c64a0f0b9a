"""`begun_token_ids`: what admission makes of it, and what it refuses."""

import pytest

from cfg_core.errors import RequestError
from cfg_core.params.begun import BEGUN, FIELD, begun_of, check_open, is_unread, read_begun
from cfg_core.params.fields import looks_like_guidance


@pytest.mark.parametrize(
    ("value", "choices", "found"),
    [
        ([], 1, [[]]),
        ([5, 0, 99], 1, [[5, 0, 99]]),
        ((5, 6), 1, [[5, 6]]),
        ([5], 3, [[5], [5], [5]]),
        ([[5], [], [6, 7]], 3, [[5], [], [6, 7]]),
        ([[5]], 1, [[5]]),
    ],
)
def test_each_choice_has_its_tokens(value, choices, found):
    read = read_begun(value, choices, 100)
    assert read == found
    assert [begun_of({BEGUN: read}, choice) for choice in range(choices)] == found


@pytest.mark.parametrize(
    ("value", "choices"),
    [
        ("5", 1),
        ({}, 1),
        (5, 1),
        ([5.0], 1),
        (["5"], 1),
        ([True], 1),
        ([None], 1),
        ([100], 1),
        ([-1], 1),
        ([[5], [6]], 1),
        ([[5]], 2),
        ([[5], 6], 2),
        ([5, [6]], 2),
        ([[[5]], [6]], 2),
        ([["x" * 9999]], 1),
    ],
)
def test_anything_else_is_refused_in_a_sentence(value, choices):
    with pytest.raises(RequestError) as caught:
        read_begun(value, choices, 100)
    assert caught.value.param == FIELD
    assert caught.value.message.startswith(FIELD)
    assert len(caught.value.message) < 200


def test_a_text_that_is_complete_does_not_go_on():
    check_open([[5, 6], []], 3, {9})
    with pytest.raises(RequestError, match="has 3 tokens, and the output may have at most 3"):
        check_open([[5], [5, 6, 7]], 3, {9})
    with pytest.raises(RequestError, match="a token that ends the text"):
        check_open([[5, 9]], 3, {9})


def test_only_admission_can_write_the_checked_tokens():
    """A caller's argument of this name is refused as an unknown field of guidance."""
    assert looks_like_guidance(BEGUN)
    assert not looks_like_guidance(FIELD)


def test_without_tokens_nothing_has_begun():
    assert begun_of(None) == begun_of({}) == begun_of({"x": 1}) == []
    assert is_unread({FIELD: [5]})
    assert not any(map(is_unread, (None, {}, {FIELD: []}, {BEGUN: [[5]]})))
