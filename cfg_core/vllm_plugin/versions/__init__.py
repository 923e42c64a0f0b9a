"""Where the vLLM versions that we run on differ.

Each difference is a method with one implementation per version: v0_32.py has all of them, and the
module of a later version has only what changed there. `chosen()` returns the implementation for the
installed vLLM. It looks at what that vLLM has, not at its version number, so a build from source is
treated by what it contains. tested.py names the versions that were tested.

A name that differs between versions is used nowhere else.
"""

from __future__ import annotations

import functools
from pathlib import Path

from cfg_core.vllm_plugin.versions.v0_32 import V032
from cfg_core.vllm_plugin.versions.v0_33 import V033

NEWEST_FIRST: tuple[type[V032], ...] = (V033, V032)


@functools.cache
def chosen() -> V032:
    """The implementation for the installed vLLM."""
    return next(cls for cls in NEWEST_FIRST if cls.is_installed())()


def is_for_another(path: Path) -> bool:
    """Whether the source file `path` holds the implementation for a version not installed here.

    Its names need not exist in the installed one.
    """
    modules = {cls: Path(cls.__module__.replace(".", "/") + ".py") for cls in NEWEST_FIRST}
    return any(
        path.parts[-4:] == module.parts and cls is not type(chosen())
        for cls, module in modules.items()
    )
