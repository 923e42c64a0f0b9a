"""Every exception that cfg-serve raises on purpose.

    CfgServeError
    ├── RequestError              the caller can mend the request (HTTP 400); also a ValueError
    │   ├── GuidanceError         a guidance field is wrong, contradictory or not supported
    │   └── CapacityError         the request can never fit this engine, however long it waits
    ├── OverloadedError           the request is fine, there is no room now (HTTP 429)
    ├── EngineError               the engine failed while it served the request (HTTP 500)
    │   └── EngineDeadError       ... and will not come back in this process (HTTP 503)
    └── ConfigError               a deployment or engine cannot start as configured; also a ValueError
        └── CompatibilityError    this vLLM, model or engine option cannot run guidance exactly

Raise the most specific one. A message says what is wrong *and* what to do instead. All of them
survive pickling, so that they cross process boundaries whole.
"""

from __future__ import annotations

REQUEST_FAULT = "The request cannot go on: "
"""Begins the reason of a request that failed in the engine by what it asked for: told as 400, not as 500."""


class CfgServeError(Exception):
    """Base of all errors below. Never raised itself."""


class RequestError(CfgServeError, ValueError):
    """The caller can mend the request. `param` names the field at fault, if one is.

    It is a ValueError, so that callers of a plain Python API meet what they expect.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class GuidanceError(RequestError):
    """A guidance field is wrong, contradictory or not supported."""


class CapacityError(RequestError):
    """The request can never fit this engine (context length, KV pool), however long it waits."""


class OverloadedError(CfgServeError):
    """There is no room for the request now. `retry_after_s`: seconds after which to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class EngineError(CfgServeError):
    """The engine failed while it served the request."""


class EngineDeadError(EngineError):
    """The engine failed and will not come back in this process."""


class ConfigError(CfgServeError, ValueError):
    """A deployment or engine cannot start as configured."""


class CompatibilityError(ConfigError):
    """This vLLM version, model or engine option cannot run guidance exactly."""
