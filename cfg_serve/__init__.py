"""cfg-serve as one package: the command `cfg-serve`, and the public names of the project.

    cfg_core       the library: guidance on any vLLM entry point
    deployments    the Ray Serve application (`import_path: deployments.app:build`)
    cfg_serve      the command, and the names below, which are those of the other two packages

Importing it imports neither torch, vllm nor ray. `guided_engine_args` and `build` are imported when
they are first used, because the first needs vllm and the second ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import cfg_core
from cfg_core import *  # noqa: F403
from cfg_core import __version__ as __version__

if TYPE_CHECKING:
    from cfg_core.vllm_plugin import guided_engine_args as guided_engine_args
    from deployments.app import build as build

_LATER = {"guided_engine_args": "cfg_core.vllm_plugin", "build": "deployments.app"}

__all__ = [*cfg_core.__all__, "build", "guided_engine_args"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'cfg_serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
