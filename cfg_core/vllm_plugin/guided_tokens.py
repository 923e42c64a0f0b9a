"""How many tokens of an output came from joint steps: the scheduler counts, the frontend reads.

The count travels with each output that has such tokens, in vLLM's `kv_transfer_params`: engines with KV connectors
are refused at start, so the field is free. The frontend takes it out again, so no client sees it.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor

from cfg_core.vllm_plugin.step import StepGuidance

PRIVATE_NAMES = (
    "vllm.v1.engine:EngineCoreOutput.kv_transfer_params",
    "vllm.v1.engine:EngineCoreOutput.new_token_ids",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
)

_KEY = "cfg_serve_guided_tokens"


@functools.lru_cache(maxsize=64)
def _mark(num_tokens: int) -> dict[str, int]:
    """Shared between outputs: nobody changes it."""
    return {_KEY: num_tokens}


# -- in the scheduler


def mark(guidance: StepGuidance | None, outputs: Any) -> None:
    """Note in the outputs of a step's joint groups how many tokens they bring: those emitted, drafts included."""
    if guidance is None:
        return
    leaders = {row.streams[0] for row in guidance.joint}
    for per_client in outputs.values():
        for output in per_client.outputs:
            if output.new_token_ids and output.request_id in leaders:
                output.kv_transfer_params = _mark(len(output.new_token_ids))


# -- in the frontend


def guided_tokens(output: Any) -> int:
    """Tokens of an EngineCoreOutput that came from joint steps."""
    marked = output.kv_transfer_params
    return int(marked.get(_KEY, 0)) if marked else 0


def install() -> None:
    """Let vLLM's OutputProcessor drop the counts, once per process. Whoever wants them reads them before."""
    original = OutputProcessor.process_outputs
    if getattr(original, "guided", False):
        return

    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.kv_transfer_params is not None and _KEY in output.kv_transfer_params:
                output.kv_transfer_params = None
        return original(self, engine_core_outputs, *args, **kwargs)

    process_outputs.guided = True  # type: ignore[attr-defined]
    OutputProcessor.process_outputs = process_outputs
