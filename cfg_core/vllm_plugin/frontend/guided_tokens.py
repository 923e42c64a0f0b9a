"""The count of guided tokens in the frontend: our own server reads it, and no client sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor

from cfg_core.vllm_plugin.wire import take_guided_tokens


def process_outputs(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `OutputProcessor.process_outputs`: removes the counts.

    Code that needs the counts reads them before this call (`wire.guided_tokens`).
    """

    @functools.wraps(stock)
    def process_outputs(
        self: OutputProcessor,
        engine_core_outputs: list[EngineCoreOutput],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        for output in engine_core_outputs:
            take_guided_tokens(output)
        return stock(self, engine_core_outputs, *args, **kwargs)

    return process_outputs
