"""Which processes are patched: those whose vLLM configuration names our scheduler.

The frontend of an engine may be in a process that somebody else starts, such as an actor of Ray.
There are two ways in which a process gets a configuration, and each is noticed without a patch, so
that a process without a guided engine stays as vLLM made it:

- It makes EngineArgs. vLLM then loads its plugins, once in a process, and `register` looks at the
  arguments that are being made (`guided_arguments`).
- It unpickles a configuration that another process has made. Our options in it are
  TravellingOptions, which patch the process in which they arrive.

What neither notices is a second engine of a process whose first one was not guided, if its
arguments were written by hand: `guided_engine_args` has to be called for it. Until then its guided
requests fail in the engine core, and say so.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from types import FrameType
from typing import Any

from cfg_core.vllm_plugin.config import ADDITIONAL_CONFIG

GUIDED_SCHEDULERS = "cfg_core.vllm_plugin.core.scheduler."
"""How the names of our schedulers begin."""

MAX_FRAMES = 8
"""Callers of `register` among which the engine arguments are looked for."""


def is_guided_scheduler(scheduler: object) -> bool:
    """Whether `scheduler_cls` of a configuration is ours, given as a name or as a class."""
    name = scheduler if isinstance(scheduler, str) else f"{getattr(scheduler, '__module__', '')}."
    return name.startswith(GUIDED_SCHEDULERS)


class TravellingOptions(dict[str, Any]):
    """Our options in `additional_config`: a mapping that patches each process where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (dict(self),)


def _arrived(options: Mapping[str, Any]) -> TravellingOptions:
    """Unpickle options. The process may become a frontend, so it is patched as one.

    Children of `multiprocessing` are left out: they are engine cores and workers, or API servers,
    whose command line `register` has read.
    """
    if multiprocessing.parent_process() is None:
        from cfg_core.vllm_plugin import vllm_patches

        vllm_patches.apply("frontend")
    return TravellingOptions(options)


def guided_arguments(frame: FrameType | None) -> Any:
    """The EngineArgs that one of these callers is making, if they name our scheduler; else None.

    frame: that of the nearest caller.
    """
    from vllm.engine.arg_utils import EngineArgs

    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        made = frame.f_locals.get("self")
        if isinstance(made, EngineArgs):
            return made if is_guided_scheduler(made.scheduler_cls) else None
        frame = frame.f_back
    return None


def let_travel(arguments: Any) -> None:
    """Let our options in EngineArgs patch the processes to which a configuration is sent."""
    given = arguments.additional_config
    if isinstance(given, dict):
        given[ADDITIONAL_CONFIG] = TravellingOptions(given.get(ADDITIONAL_CONFIG) or {})
