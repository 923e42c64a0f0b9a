"""Priority and timeout, as requests state them."""

import pytest

from cfg_core.errors import RequestError
from deployments.requests.terms import Terms, take_terms


def terms(body=None, headers=None, default=None, **options):
    return take_terms(dict(body or {}), headers or {}, default_timeout_s=default, **options)


@pytest.mark.parametrize(
    ("body", "headers", "default", "expected"),
    [
        ({}, {}, None, Terms()),
        ({}, {}, 60.0, Terms(timeout_s=60.0)),
        ({"timeout": 5}, {}, 60.0, Terms(timeout_s=5.0)),
        ({}, {"x-request-timeout": "2.5"}, None, Terms(timeout_s=2.5)),
        ({"timeout": 5}, {"x-request-timeout": "2.5"}, None, Terms(timeout_s=2.5)),
        ({"priority": -3}, {}, None, Terms(priority=-3)),
        ({"timeout": None, "priority": None}, {}, None, Terms()),
    ],
)
def test_terms(body, headers, default, expected):
    assert terms(body, headers, default) == expected


def test_the_engine_does_not_see_the_timeout():
    body = {"timeout": 3, "priority": 1, "prompt": "x"}
    take_terms(body, {}, default_timeout_s=None)
    assert body == {"priority": 1, "prompt": "x"}


@pytest.mark.parametrize("value", [0, -1, "soon", True, [], float("nan"), float("inf"), "nan"])
def test_a_timeout_is_a_number_of_seconds(value):
    with pytest.raises(RequestError, match="timeout must be"):
        terms({"timeout": value})
    with pytest.raises(RequestError, match="timeout must be"):
        terms({}, {"x-request-timeout": str(value) if value is not True else "true"})


@pytest.mark.parametrize("value", [1.5, "high", True, 10**6, -(10**6), []])
def test_a_priority_is_a_small_integer(value):
    with pytest.raises(RequestError, match="priority must be"):
        terms({"priority": value})


def test_a_key_bounds_the_priority():
    assert terms(min_priority=5).priority == 5
    assert terms({"priority": 7}, min_priority=5).priority == 7
    with pytest.raises(RequestError, match="more urgent than this key allows"):
        terms({"priority": 4}, min_priority=5)
