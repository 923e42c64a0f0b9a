"""cfg_core: classifier-free guidance for any autoregressive model that vLLM runs.

Importing this package imports neither torch, vllm nor ray. Some of its modules import torch, and
those of `cfg_core.vllm_plugin` import vllm. None imports ray.
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
    ForeignOriginError,
    GuidanceError,
    MediaTypeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestError,
    UnknownHostError,
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
    "ForeignOriginError",
    "GuidanceError",
    "GuidanceParams",
    "MediaTypeError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "RequestError",
    "UnknownHostError",
    "UnknownModelError",
]
__version__ = "0.1.0"
