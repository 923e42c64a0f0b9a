"""vLLM as the runner (`workflow: {executor: vllm}`).

It is for retrievers with 7B parameters and more, and for tensor parallelism. Tokenizing,
scheduling, truncation and everything after the pooling remain with this engine, so that a client
cannot tell the two runners apart. vLLM's engine runs in processes of its own, or in this process if
VLLM_ENABLE_V1_MULTIPROCESSING is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig

from cfg_core.errors import CompatibilityError
from cfg_core.prefill_only.batch import PackedBatch, Values
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import Task

_POOLING_TYPES = {"cls": "CLS", "mean": "MEAN", "last": "LAST"}


class VllmRunner:
    """Computes batches with vLLM, see runner.Runner. The device thread calls `compute`."""

    first_position = 0
    uses_token_types = False
    max_positions: int | None
    on_gpu = False  # tensors stay on the host: vLLM copies the tokens itself

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, special_ids: frozenset[int]
    ) -> None:
        _check(checkpoint)
        self._llm = LLM(**_engine_arguments(checkpoint, options))
        self._num_threads = torch.get_num_threads()
        config = self._llm.model_config
        self.max_positions = config.max_model_len
        self.dtype: torch.dtype = config.dtype
        self.tasks: tuple[Task, ...] = checkpoint.tasks[:1]  # a vLLM engine has one pooling task
        self.token_dimension = None
        self.dimension = None if checkpoint.head == "classifier" else config.get_hidden_size()

    def compute(self, batch: PackedBatch) -> Values:
        if torch.get_num_threads() != self._num_threads:
            # Holds for the calling thread only; vLLM's CPU kernels check it.
            torch.set_num_threads(self._num_threads)
        (task,) = self.tasks
        prompts = [{"prompt_token_ids": list(sequence.token_ids)} for sequence in batch.sequences]
        # The output processor does normalisation and activation.
        raw = PoolingParams(task=task, use_activation=False)
        results = self._llm.encode(prompts, raw, pooling_task=task, use_tqdm=False)
        return {task: [result.outputs.data.float().cpu().numpy() for result in results]}

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.llm_engine.engine_core.shutdown()


def _check(checkpoint: Checkpoint) -> None:
    """Raise CompatibilityError for a checkpoint whose results vLLM would compute differently."""
    lacks = {
        "sparse vectors": checkpoint.head == "splade" or checkpoint.has_bge_m3_heads,
        "Dense layers": bool(checkpoint.dense),
        "late interaction": checkpoint.head == "late_interaction",
        "scores of language models": checkpoint.head == "logit_score",
        "token types of pairs": (
            checkpoint.head == "classifier" and checkpoint.config.get("type_vocab_size", 0) > 1
        ),
        "pooling without the prompt": not checkpoint.include_prompt,
        "several poolings": checkpoint.head == "embedding" and len(checkpoint.poolings) > 1,
    }
    for what, lacking in lacks.items():
        if lacking:
            raise CompatibilityError(
                f"the executor vllm does not compute {what}: use the executor thread."
            )


def _engine_arguments(checkpoint: Checkpoint, options: EngineOptions) -> dict[str, Any]:
    """Arguments of vLLM's LLM; those under `vllm:` in the options take precedence."""
    arguments: dict[str, Any] = {
        "model": str(checkpoint.path),
        "runner": "pooling",
        "dtype": options.dtype,
        # Nothing is decoded, and the cache does not hold pooled states.
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if options.max_input_tokens:
        arguments["max_model_len"] = options.max_input_tokens
    if options.pooling:
        arguments["pooler_config"] = PoolerConfig(pooling_type=_POOLING_TYPES[options.pooling])
    if options.is_causal is not None:
        arguments["hf_overrides"] = {"is_causal": options.is_causal}
    return arguments | dict(options.vllm)
