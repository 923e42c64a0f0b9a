"""Errors of vLLM get the names of the fields that the client has sent."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.generator.refusals.field_names import inner_field, named
from deployments.requests.endpoints import Endpoint

ZERO = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
LOGPROBS = "Requested sample logprobs of 21, which is too many (parameter=logprobs)"


@pytest.mark.parametrize(
    ("endpoint", "body", "message", "param", "field"),
    [
        ("chat", {"max_completion_tokens": 0}, ZERO, "max_tokens", "max_completion_tokens"),
        ("chat", {"max_tokens": 0}, ZERO, "max_tokens", "max_tokens"),
        ("responses", {"max_output_tokens": 0}, ZERO, "max_tokens", "max_output_tokens"),
        ("messages", {"max_tokens": 0}, ZERO, "max_completion_tokens", "max_tokens"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, LOGPROBS, "logprobs", "top_logprobs"),
        ("completion", {"logprobs": 21}, LOGPROBS, "logprobs", "logprobs"),
        ("chat", {"n": 0, "model": "n"}, "n must be at least 1, got 0.", None, "n"),
        ("chat", {"stop": ""}, "stop cannot contain an empty string.", None, "stop"),
        ("chat", {"echo": 1}, "Cannot set both `other` and `echo` to True.", None, "echo"),
        ("chat", {"model": "m"}, "m is not a multimodal model.", None, None),
        (
            "chat",
            {"structured_outputs": {}},
            "One structured outputs constraint",
            None,
            "structured_outputs",
        ),
    ],
)
def test_the_field_is_the_clients(
    endpoint: Endpoint, body: dict[str, Any], message: str, param: str | None, field: str | None
) -> None:
    told, found = named(endpoint, body, message, param)
    assert found == field
    if param is not None:
        assert f"parameter={field}" in told.replace("max_completion_tokens", str(field))


def test_python_is_not_shown() -> None:
    message, _ = named("chat", {}, "none are specified: {'json': None, '_backend': None}", None)
    assert message == "none are specified"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("f() got multiple values for keyword argument 'conversation'", "kwargs.conversation"),
        ("'str' object has no attribute 'items'", None),
    ],
)
def test_a_member_that_became_an_argument(message: str, field: str | None) -> None:
    assert inner_field({"model": "x", "kwargs": {"conversation": 1}}, message) == field
