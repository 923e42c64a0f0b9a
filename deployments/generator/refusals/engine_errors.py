"""Turns whatever vLLM raises into an error of cfg_core.errors, which can be sent between processes.

vLLM does not check the types of many fields, so a client's mistake causes an AttributeError or a
KeyError in vLLM, which must not be reported as a server error. The rule is: an error of this kind
*before* the request is in the engine was caused by what the client sent; a later one was not.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pydantic
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError, VLLMServerError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from cfg_core.vllm_plugin.frontend.admission import AdmissionError
from deployments.generator.refusals.faults import reason_of
from deployments.generator.refusals.field_names import inner_field, named
from deployments.http.errors import error_of
from deployments.requests.endpoints import Endpoint

logger = logging.getLogger("ray.serve")

NO_BODY: Mapping[str, Any] = MappingProxyType({})

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


def unnamed(error: Exception) -> str:
    """The sentence for an error that does not say which field is wrong.

    Only a ValueError has a message for people. That of pydantic's shows the whole value.
    """
    reason = "see the schema of this route in /openapi.json"
    if isinstance(error, pydantic.ValidationError):
        reason = reason_of(error)
    elif isinstance(error, ValueError) and str(error):
        reason = str(error)
    return f"The body has a field of a wrong type or shape: {reason.removesuffix('.')}."


def checked(answer: Any) -> Any:
    """Return the `answer` of a serving class.

    If it is vLLM's error object, it is raised as one of our own errors.
    """
    if isinstance(answer, ErrorResponse):
        raise _from_response(answer)
    return answer


def client_error(error: Exception, body: Mapping[str, Any] = NO_BODY) -> VLLMClientError | None:
    """Return vLLM's error for a bad request if the client caused `error`, else None.

    `error` must have been raised before the request was in the engine.

    body: of the request, if it is known.
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
    # What it says may quote the request, so the log has only its class and its place.
    where = traceback.extract_tb(error.__traceback__)[-1:]
    logger.warning("refused with 400: %s, raised at %s", type(error).__name__, *where or ("?",))
    if not isinstance(error, ValueError) and (field := inner_field(body, str(error))):
        return VLLMValidationError(f"{field} cannot be used: leave it out.", parameter=field)
    return VLLMValidationError(unnamed(error))


@contextmanager
def naming(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[None]:
    """Give errors about the request the names of fields that the client has sent."""
    try:
        yield
    except RequestError as error:
        error.message, error.param = named(endpoint, body, error.message, error.param)
        error.args = (error.message, error.param)  # what is pickled
        raise


@contextmanager
def own_errors() -> Iterator[None]:
    """Turn whatever is raised inside into one of our own errors."""
    try:
        yield
    except Exception as error:
        raise own_error(error) from None


@contextmanager
def reading(body: Mapping[str, Any] = NO_BODY) -> Iterator[None]:
    """As own_errors, for code that only reads a request: WRONG_SHAPE becomes a RequestError.

    body: of the request, if it is known.
    """
    try:
        yield
    except CfgServeError:
        raise
    except Exception as error:
        raise own_error(client_error(error, body) or error) from None


def own_error(error: Exception) -> CfgServeError:
    """Turn any exception of vLLM into one of our own, which is small.

    CfgRouter can unpickle it without vllm.
    """
    if isinstance(error, CfgServeError):
        return error
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError("The engine of this replica has stopped: send the request again.")
    if isinstance(error, AdmissionError):
        return RequestError(str(error.args[0]), error.parameter)
    return _from_response(create_error_response(error))


def _from_response(response: ErrorResponse) -> CfgServeError:
    error = response.error
    return error_of(error.code, error.message, error.param)
