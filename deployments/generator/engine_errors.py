"""Whose fault it is: whatever comes out of vLLM, as one of our own errors, which are small and
cross processes.

vLLM takes the types of many fields for granted, so a client's mistake comes out of it as an
AttributeError or a KeyError, which a server must not call its own. The rule here: what fails in
this way *before* the request is in the engine was caused by what the client sent; what fails later
was not.

Importing it imports vllm: only a replica does.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pydantic
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError, VLLMServerError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from deployments.http.errors import error_of

logger = logging.getLogger("ray.serve")

WRONG_SHAPE = (
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
"""What code raises that meets a value of another type, size or shape than it expects."""


def parse(model: type[pydantic.BaseModel], body: dict[str, Any]) -> Any:
    """`body` as vLLM's request object, or RequestError that names the field at fault."""
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: pydantic.ValidationError) -> RequestError:
    """One sentence from pydantic's list, which has an entry for each member of a union."""
    errors = error.errors(include_url=False, include_input=False)
    field, *path = errors[0]["loc"] or ("body",)
    index = f"[{path[0]}]" if path and isinstance(path[0], int) else ""
    reasons = dict.fromkeys(
        e["msg"].removeprefix("Value error, ") for e in errors if e["loc"][:1] == (field,)
    )
    return RequestError(f"{field}{index}: {'; or '.join([*reasons][:3])}.", str(field))


def checked(answer: Any) -> Any:
    """`answer` of a serving class, unless it is vLLM's error object, which is raised as one of
    ours."""
    if isinstance(answer, ErrorResponse):
        raise _from_response(answer)
    return answer


def client_error(error: Exception) -> VLLMClientError | None:
    """vLLM's error for what the client sent, if `error` is that; it was raised before the request
    was in the engine."""
    if isinstance(error, VLLMClientError):
        return error
    if isinstance(error, VLLMServerError) or not isinstance(error, WRONG_SHAPE):
        return None
    where = traceback.extract_tb(error.__traceback__)[-1:]
    logger.warning(
        "refused with 400: %s: %s, raised at %s", type(error).__name__, error, *where or ("?",)
    )
    return VLLMValidationError(
        f"The body has a field of a wrong type or shape: {error or type(error).__name__}."
    )


@contextmanager
def own_errors() -> Iterator[None]:
    """Whatever is raised inside comes out as one of our own errors."""
    try:
        yield
    except Exception as error:
        raise own_error(error) from None


@contextmanager
def reading() -> Iterator[None]:
    """As own_errors, around what reads a request and does nothing else: what meets a wrong shape is
    a RequestError."""
    try:
        yield
    except CfgServeError:
        raise
    except Exception as error:
        raise own_error(client_error(error) or error) from None


def own_error(error: Exception) -> CfgServeError:
    """Any exception that comes out of vLLM, as one of our own: small, and understood by the
    router."""
    if isinstance(error, CfgServeError):
        return error
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError("The engine of this replica is gone: send the request again.")
    if isinstance(error, VLLMValidationError):
        return RequestError(str(error.args[0]), error.parameter)
    return _from_response(create_error_response(error))


def _from_response(response: ErrorResponse) -> CfgServeError:
    error = response.error
    return error_of(error.code, error.message, error.param)
