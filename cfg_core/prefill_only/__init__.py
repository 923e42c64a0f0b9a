"""Engines for prefill-only models: encoders, retrievers, rerankers and classifiers.

Such models need no KV cache and have no decode phase.

    from cfg_core.prefill_only import Engine
    vectors = Engine.load("sentence-transformers/all-MiniLM-L6-v2").embed(texts)

Importing this package imports neither torch nor transformers. Loading a model imports both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import Output, RequestOptions, SparseVector

if TYPE_CHECKING:
    from cfg_core.prefill_only.async_engine import AsyncEngine
    from cfg_core.prefill_only.engine import Engine

__all__ = ["AsyncEngine", "Engine", "EngineOptions", "Output", "RequestOptions", "SparseVector"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from cfg_core.prefill_only.engine import Engine

        return Engine
    if name == "AsyncEngine":
        from cfg_core.prefill_only.async_engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
