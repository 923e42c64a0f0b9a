"""The fields that vLLM took before `structured_outputs`."""

from __future__ import annotations

import pytest

from cfg_core.errors import RequestError
from deployments.requests.old_names import with_structured_outputs


def test_old_fields_become_structured_outputs() -> None:
    body = {"prompt": "x", "guided_json": {"type": "integer"}, "guided_whitespace_pattern": " ?"}
    assert with_structured_outputs("completion", body) == {
        "prompt": "x",
        "structured_outputs": {"json": {"type": "integer"}, "whitespace_pattern": " ?"},
    }


@pytest.mark.parametrize("body", [{}, {"guided_choice": None}, {"structured_outputs": {}}])
def test_other_bodies_stay(body: dict[str, object]) -> None:
    assert with_structured_outputs("chat", body) is body


def test_endpoints_that_never_had_them_stay() -> None:
    body = {"guided_choice": ["a"]}
    assert with_structured_outputs("messages", body) is body


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["a"], "guided_regex": "a"},
        {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}},
    ],
)
def test_two_of_them_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="exclude each other") as refusal:
        with_structured_outputs("chat", body)
    assert refusal.value.param in body
