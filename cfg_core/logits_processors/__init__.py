"""Stateful logits processors, one for each sequence, made by named factories.

Use the names below to write a processor. registry.py describes how it gets its name. Importing this
package does not import torch, so that config.py can check a YAML file without it. The first use of
one of the names imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfg_core.logits_processors.base import (
        EngineInfo,
        LogitsProcessor,
        LogitsProcessorFactory,
        SequenceInfo,
    )

__all__ = ["EngineInfo", "LogitsProcessor", "LogitsProcessorFactory", "SequenceInfo"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from cfg_core.logits_processors import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
