"""cfg_core: classifier-free guidance for any autoregressive model that vLLM runs.

Importing it imports neither torch, vllm nor ray; `cfg_core.vllm_plugin` is the part that does.
"""

from cfg_core.errors import (
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    CapacityError,
    CfgServeError,
    CompatibilityError,
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    GuidanceError,
    OverloadedError,
    PermissionDeniedError,
    RequestError,
    UnknownModelError,
)
from cfg_core.params import GuidanceParams

__all__ = [
    "AuthenticationError",
    "BodyTimeoutError",
    "BodyTooLargeError",
    "CapacityError",
    "CfgServeError",
    "CompatibilityError",
    "ConfigError",
    "DeadlineError",
    "EngineDeadError",
    "EngineError",
    "GuidanceError",
    "GuidanceParams",
    "OverloadedError",
    "PermissionDeniedError",
    "RequestError",
    "UnknownModelError",
]
__version__ = "0.1.0"
