"""Logits processors with a state, one for each sequence, made by named factories.

Write a processor with the names below; registry.py says how it gets its name. Importing this
package does not import torch, so that a YAML file can be checked without it (config.py); the first
use of a name does.
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
