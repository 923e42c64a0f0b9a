"""Our errors: that the package exports them, that pickling loses nothing, their HTTP answers."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest

import cfg_core
from cfg_core import errors
from deployments.http.errors import error_of, http_error

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]

ANSWERS = [
    # error, status, type, headers
    (errors.CfgServeError("m"), 500, "InternalServerError", {}),
    (errors.RequestError("Send a prompt."), 400, "BadRequestError", {}),
    (errors.GuidanceError("Send one.", "negative_prompt"), 400, "BadRequestError", {}),
    (errors.CapacityError("Too long.", param="prompt"), 400, "BadRequestError", {}),
    (errors.NotFoundError("No such file.", "name"), 404, "NotFoundError", {}),
    (errors.UnknownModelError("No such model.", "model"), 404, "NotFoundError", {}),
    (errors.BodyTimeoutError("Too slow."), 408, "timeout_error", {}),
    (errors.BodyTooLargeError("Too large."), 413, "invalid_request_error", {}),
    (errors.MediaTypeError("Not JSON."), 415, "invalid_request_error", {}),
    (errors.ForeignOriginError("Not from there."), 403, "permission_error", {}),
    (errors.UnknownHostError("Not my name."), 421, "invalid_request_error", {}),
    (
        errors.AuthenticationError("Who?"),
        401,
        "authentication_error",
        {"WWW-Authenticate": "Bearer"},
    ),
    (errors.PermissionDeniedError("Not this one.", "model"), 403, "permission_error", {}),
    (errors.DeadlineError("Out of time."), 504, "timeout_error", {"x-should-retry": "false"}),
    (errors.OverloadedError("Full."), 429, "overloaded_error", {"Retry-After": "1"}),
    (errors.OverloadedError("Full.", 2.2), 429, "overloaded_error", {"Retry-After": "3"}),
    (errors.EngineError("It broke."), 500, "InternalServerError", {}),
    (errors.EngineDeadError("Gone."), 503, "ServiceUnavailableError", {"Retry-After": "1"}),
    (errors.ConfigError("No model."), 500, "InternalServerError", {}),
    (errors.CompatibilityError("Not with this vLLM."), 500, "InternalServerError", {}),
]


def test_every_error_has_an_answer_and_is_exported() -> None:
    assert {type(error) for error, *_ in ANSWERS} == set(ALL)
    for cls in ALL:
        assert getattr(cfg_core, cls.__name__) is cls
        assert cls.__name__ in cfg_core.__all__


def test_errors_of_users_are_value_errors_and_others_are_not() -> None:
    of_users = {cls for cls in ALL if issubclass(cls, ValueError)}
    assert of_users == {
        cls for cls in ALL if issubclass(cls, (errors.RequestError, errors.ConfigError))
    }


@pytest.mark.parametrize(("error", "status", "kind", "headers"), ANSWERS, ids=repr)
def test_answers_over_http(error: errors.CfgServeError, status: int, kind: str, headers) -> None:
    answer = http_error(error)
    expected = {"message": str(error), "type": kind, "param": getattr(error, "param", None)}
    assert (answer.status, answer.headers) == (status, headers)
    assert answer.body == {"error": {**expected, "code": status}}
    of_anthropic = http_error(error, "/v1/messages")
    assert of_anthropic.body == {"type": "error", **answer.body}


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        *(
            lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
@pytest.mark.parametrize("error", [error for error, *_ in ANSWERS], ids=repr)
def test_copying_and_pickling_keep_everything(again, error: Exception) -> None:
    copied = again(error)
    assert type(copied) is type(error)
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))


def test_the_text_is_the_message_alone() -> None:
    for error, *_ in ANSWERS:
        assert str(error) == error.args[0]
    assert errors.RequestError("x").param is None
    assert errors.OverloadedError("x").retry_after_s == 1.0


def test_messages_that_json_cannot_encode_are_repaired() -> None:
    body = http_error(errors.RequestError("bad \ud800 text", "prompt")).body
    assert json.dumps(body, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("status", "param", "cls"),
    [
        (400, "p", errors.RequestError),
        (404, "p", errors.NotFoundError),
        (404, "model", errors.UnknownModelError),
        (422, "p", errors.RequestError),
        (429, "p", errors.OverloadedError),
        (500, "p", errors.EngineError),
        (501, "p", errors.RequestError),
        (503, "p", errors.OverloadedError),
    ],
)
def test_errors_of_vllm(status: int, param: str, cls: type[Exception]) -> None:
    assert type(error_of(status, "m", param)) is cls
