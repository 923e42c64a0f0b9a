"""Stands in for torchvision where it is not installed, so that vLLM's image models can be imported.

They import transformers' image processors, and these import torchvision, although the processors
for Pillow are used. Only imports find it: transformers, which asks whether torchvision is there,
is told the truth.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = {"torchvision", "torchvision.transforms", "torchvision.transforms.v2"}
MODULES = {
    *PACKAGES,
    "torchvision.io",
    "torchvision.ops",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2.functional",
}


class StandIn:
    """Finds modules of these names. Each name in them is a class that has no use."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES or _is_question():
            return None
        return ModuleSpec(name, self, is_package=name in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Let every name be imported."""
        module.__getattr__ = _made  # type: ignore[method-assign]


def _made(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def _is_question() -> bool:
    """Whether transformers asks if the package is there."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_is_package_available":
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Use the stand-in in this process if there is no torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(StandIn())
