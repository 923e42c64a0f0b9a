"""cfg_core: classifier-free guidance for any autoregressive model that vLLM runs.

Importing it imports neither torch, vllm nor ray; `cfg_core.vllm_plugin` is the part that does.
"""

from cfg_core.errors import (
    CapacityError,
    CfgServeError,
    CompatibilityError,
    ConfigError,
    EngineDeadError,
    EngineError,
    GuidanceError,
    OverloadedError,
    RequestError,
)
from cfg_core.params import GuidanceParams

__all__ = [
    "CapacityError",
    "CfgServeError",
    "CompatibilityError",
    "ConfigError",
    "EngineDeadError",
    "EngineError",
    "GuidanceError",
    "GuidanceParams",
    "OverloadedError",
    "RequestError",
]
__version__ = "0.1.0"
