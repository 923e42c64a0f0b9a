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

MODULES = {"torchvision", "torchvision.transforms", "torchvision.transforms.v2"}
FUNCTIONAL = "torchvision.transforms.v2.functional"


class StandIn:
    """Finds empty modules of these names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in {*MODULES, FUNCTIONAL} or _is_question():
            return None
        return ModuleSpec(name, self, is_package=name in MODULES)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


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
