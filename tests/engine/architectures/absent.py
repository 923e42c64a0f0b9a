"""A stand-in for torchvision, which the pinned environment does not have.

vLLM imports it with the code of many models that read images, even if no image will ever come. The
names of the stand-in can be imported, and nothing can be done with them.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Absent(types.ModuleType):
    """A module in which every name is a class without a use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in_for_torchvision() -> None:
    """Let `import torchvision` succeed in this process, if it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in MODULES:
        module = sys.modules[name] = Absent(name)
        module.__path__ = []
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
