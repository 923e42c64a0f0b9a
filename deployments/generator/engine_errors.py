"""Turns whatever vLLM raises into an error of cfg_core.errors, which can be sent between processes.

vLLM does not check the types of many fields, so a client's mistake causes an AttributeError or a
KeyError in vLLM, which must not be reported as a server error. The rule is: an error of this kind
*before* the request is in the engine was caused by what the client sent; a later one was not.


Importing this module imports vllm, so only a replica does it.
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
from cfg_core.vllm_plugin.frontend.admission import RefusedError
from deployments.generator.validators import validator_of
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
"""What code raises when it meets a value of another type, size or shape than it expects."""


def parse(model: type[pydantic.BaseModel], body: dict[str, Any]) -> Any:
    """Return `body` as vLLM's request object.

    Raises RequestError that names the field at fault: the first one, if a list has several.
    """
    try:
        return validator_of(model).validate_python(body)
    except pydantic.ValidationError as error:
        raise _invalid(error, body) from None


def _invalid(error: pydantic.ValidationError, body: dict[str, Any]) -> RequestError:
    """Make one sentence of pydantic's list, which has an entry for each member of a union.

    It is about the innermost value of the body that is at fault.
    """
    errors = error.errors(include_url=False, include_input=False)
    of_field = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    paths = [_path(e["loc"], e["type"] == "missing", body) for e in of_field]
    path = max(paths, key=len)
    reasons = dict.fromkeys(
        e["msg"].removeprefix("Value error, ")
        for e, at in zip(of_field, paths, strict=True)
        if at == path
    )
    return RequestError(f"{path or 'body'}: {'; or '.join([*reasons][:3])}.", path or None)


def _path(loc: tuple[int | str, ...], is_missing: bool, body: object) -> str:
    """Where in the body an error of pydantic is, such as `messages[0].role`.

    Its own path also has the members of unions in it, which are not in the body. A field that is
    missing is the last part.
    """
    parts = []
    for part in loc:
        if isinstance(body, dict) and part in body:
            parts.append(f".{part}")
            body = body[part]
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            parts.append(f"[{part}]")
            body = body[part]
        elif is_missing and part is loc[-1]:
            parts.append(f".{part}")
    return "".join(parts).removeprefix(".")


def checked(answer: Any) -> Any:
    """Return the `answer` of a serving class.

    If it is vLLM's error object, it is raised as one of our own errors.
    """
    if isinstance(answer, ErrorResponse):
        raise _from_response(answer)
    return answer


def client_error(error: Exception) -> VLLMClientError | None:
    """Return vLLM's error for a bad request if the client caused `error`, else None.

    `error` must have been raised before the request was in the engine.
    """
    if isinstance(error, VLLMClientError):
        return error
    if isinstance(error, VLLMServerError) or not isinstance(error, WRONG_SHAPE):
        return None
    if str(error).startswith("Failed to apply "):  # a model's processor; it shows the whole prompt
        reason = error.__cause__ or "its processor fails"
        return VLLMValidationError(
            f"This model cannot read the images, audio or video of the request: {reason}"
        )
    where = traceback.extract_tb(error.__traceback__)[-1:]
    logger.warning(
        "refused with 400: %s: %s, raised at %s", type(error).__name__, error, *where or ("?",)
    )
    return VLLMValidationError(
        f"The body has a field of a wrong type or shape: {error or type(error).__name__}."
    )


@contextmanager
def own_errors() -> Iterator[None]:
    """Turn whatever is raised inside into one of our own errors."""
    try:
        yield
    except Exception as error:
        raise own_error(error) from None


@contextmanager
def reading() -> Iterator[None]:
    """As own_errors, for code that only reads a request: WRONG_SHAPE becomes a RequestError."""
    try:
        yield
    except CfgServeError:
        raise
    except Exception as error:
        raise own_error(client_error(error) or error) from None


def own_error(error: Exception) -> CfgServeError:
    """Turn any exception of vLLM into one of our own, which is small.

    CfgRouter can unpickle it without vllm.
    """
    if isinstance(error, CfgServeError):
        return error
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError("The engine of this replica has stopped: send the request again.")
    if isinstance(error, RefusedError):
        return RequestError(str(error.args[0]), error.parameter)
    return _from_response(create_error_response(error))


def _from_response(response: ErrorResponse) -> CfgServeError:
    error = response.error
    return error_of(error.code, error.message, error.param)
