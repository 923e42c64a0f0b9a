"""The exceptions that cfg-serve raises to its callers, with their HTTP status.

    CfgServeError
    ├── RequestError              400  the caller can correct the request; also a ValueError
    │   ├── GuidanceError         400  a guidance field is wrong, contradictory or not supported
    │   ├── CapacityError         400  the request can never fit this engine, however long it waits
    │   ├── NotFoundError         404  the request names something that is not here
    │   │   └── UnknownModelError 404  the request names a model that is not served here
    │   ├── BodyTimeoutError      408  the request's body did not arrive in time
    │   ├── BodyTooLargeError     413  the request's body is larger than this server reads
    │   ├── MediaTypeError        415  the request's body is not declared as JSON
    │   ├── ForeignOriginError    403  the web page that sent the request may not call this server
    │   └── UnknownHostError      421  the request calls this server by a name that is not its own
    ├── AuthenticationError       401  the request has no API key, or an unknown one
    ├── PermissionDeniedError     403  the API key is known, but it may not do this
    ├── OverloadedError           429  the request is valid, but there is no room for it now
    ├── DeadlineError             504  the request's own `timeout` has passed
    ├── EngineError               500  the engine failed while it served the request
    │   └── EngineDeadError       503  the engine failed and cannot recover in this process
    └── ConfigError                    wrong deployment or engine configuration; also a ValueError
        └── CompatibilityError         this vLLM, model or option cannot run guidance exactly

Raise the most specific one. A message says what is wrong *and* what to do instead. All of them can
be pickled without loss, so that they can cross process boundaries.
"""

from __future__ import annotations

REQUEST_FAULT = "The request cannot continue: "
"""Prefix of the reason if a request failed in the engine because of what it asked for.

Such a failure gets status 400 instead of 500.
"""


class CfgServeError(Exception):
    """Base class of all errors below, which is never raised itself.

    param: the field at fault, if any.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class RequestError(CfgServeError, ValueError):
    """The caller can correct the request.

    It is a ValueError, because that is what callers of a plain Python API expect.
    """


class GuidanceError(RequestError):
    """A guidance field is wrong, contradictory or not supported."""


class CapacityError(RequestError):
    """The request can never fit this engine (context length, KV pool), however long it waits."""


class NotFoundError(RequestError):
    """The request names something that is not here."""


class UnknownModelError(NotFoundError):
    """The request names a model that is not served here."""


class BodyTimeoutError(RequestError):
    """The request's body did not arrive in time."""


class BodyTooLargeError(RequestError):
    """The request's body is larger than this server reads."""


class MediaTypeError(RequestError):
    """The request's body is not declared as JSON."""


class ForeignOriginError(RequestError):
    """The web page that sent the request may not call this server."""


class UnknownHostError(RequestError):
    """The request calls this server by a name that is not its own."""


class AuthenticationError(CfgServeError):
    """The request has no API key, or one that is not known here."""


class PermissionDeniedError(CfgServeError):
    """The API key is known, but it may not do this."""


class OverloadedError(CfgServeError):
    """There is no room for the request now.

    retry_after_s: seconds after which the client should try again.
    reason: what is full, in one word for metrics.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0, reason: str = "engine") -> None:
        super().__init__(message)
        self.args = (message, retry_after_s, reason)  # pickle calls __init__ with these
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlineError(CfgServeError):
    """The request's own `timeout` has passed."""


class EngineError(CfgServeError):
    """The engine failed while it served the request."""


class EngineDeadError(EngineError):
    """The engine failed and cannot recover in this process."""


class ConfigError(CfgServeError, ValueError):
    """A deployment or engine cannot start as configured."""


class CompatibilityError(ConfigError):
    """This vLLM version, model or engine option cannot run guidance exactly."""
