"""The exception tree: its shape, its messages, and that errors can be pickled without loss."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import cfg_core
from cfg_core import errors

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]

PARENTS = {
    errors.CfgServeError: Exception,
    errors.RequestError: errors.CfgServeError,
    errors.GuidanceError: errors.RequestError,
    errors.CapacityError: errors.RequestError,
    errors.NotFoundError: errors.RequestError,
    errors.UnknownModelError: errors.NotFoundError,
    errors.BodyTimeoutError: errors.RequestError,
    errors.BodyTooLargeError: errors.RequestError,
    errors.MediaTypeError: errors.RequestError,
    errors.ForeignOriginError: errors.RequestError,
    errors.UnknownHostError: errors.RequestError,
    errors.AuthenticationError: errors.CfgServeError,
    errors.PermissionDeniedError: errors.CfgServeError,
    errors.OverloadedError: errors.CfgServeError,
    errors.DeadlineError: errors.CfgServeError,
    errors.EngineError: errors.CfgServeError,
    errors.EngineDeadError: errors.EngineError,
    errors.ConfigError: errors.CfgServeError,
    errors.CompatibilityError: errors.ConfigError,
}

EXAMPLES = [
    errors.RequestError("Send a prompt."),
    errors.GuidanceError("Send one of them.", "negative_prompt"),
    errors.CapacityError("Too long.", param="prompt"),
    errors.NotFoundError("No such file.", "name"),
    errors.UnknownModelError("No such model.", "model"),
    errors.BodyTimeoutError("Too slow."),
    errors.BodyTooLargeError("Too large."),
    errors.MediaTypeError("Not JSON."),
    errors.ForeignOriginError("Not from there."),
    errors.UnknownHostError("Not my name."),
    errors.AuthenticationError("Who?"),
    errors.PermissionDeniedError("Not this one.", "model"),
    errors.DeadlineError("Out of time."),
    errors.OverloadedError("Full."),
    errors.OverloadedError("Full.", retry_after_s=2.5),
    errors.EngineError("It broke."),
    errors.EngineDeadError("It is gone."),
    errors.ConfigError("No model."),
    errors.CompatibilityError("Not with this vLLM."),
]


def test_the_tree_is_as_drawn() -> None:
    assert set(ALL) == set(PARENTS)
    for cls, parent in PARENTS.items():
        assert cls.__bases__[0] is parent


@pytest.mark.parametrize("cls", ALL)
def test_the_docstring_draws_it_and_the_package_exports_it(cls: type[Exception]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")
    assert getattr(cfg_core, cls.__name__) is cls
    assert cls.__name__ in cfg_core.__all__
    assert cls.__doc__


def test_errors_of_users_are_value_errors_and_others_are_not() -> None:
    of_users = {cls for cls in ALL if issubclass(cls, ValueError)}
    assert of_users == {
        cls for cls in ALL if issubclass(cls, (errors.RequestError, errors.ConfigError))
    }


@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_everything(error: Exception, protocol: int) -> None:
    _assert_same(pickle.loads(pickle.dumps(error, protocol)), error)


@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
def test_copying_keeps_everything(error: Exception) -> None:
    _assert_same(copy.copy(error), error)
    _assert_same(copy.deepcopy(error), error)


def test_the_text_is_the_message_alone() -> None:
    assert str(errors.GuidanceError("Send one of them.", "negative_prompt")) == "Send one of them."
    assert str(errors.OverloadedError("Full.", 3.0)) == "Full."
    assert str(errors.EngineError("It broke.")) == "It broke."


def test_param_and_retry_after_have_defaults() -> None:
    assert errors.RequestError("x").param is None
    assert errors.OverloadedError("x").retry_after_s == 1.0


def _assert_same(copied: Exception, original: Exception) -> None:
    assert type(copied) is type(original)
    assert str(copied) == str(original)
    assert copied.args == original.args
    assert vars(copied) == vars(original)
