"""Computes one forward: a packed batch in, pooled values out. The device thread runs it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional

from cfg_core.prefill_only.batch import PackedBatch, Values
from cfg_core.prefill_only.models.backbones import packed
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.models.cpu_linear import rows_of
from cfg_core.prefill_only.models.families import (
    OWN_ATTENTION,
    check_family,
    is_causal,
)
from cfg_core.prefill_only.models.loading import (
    backbone_of,
    choose_device,
    choose_dtype,
    first_position,
    load_model,
    max_positions,
    uses_token_types,
)
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.stages import attention
from cfg_core.prefill_only.stages.poolers import DensePooler, TokenPooler, make_poolers
from cfg_core.prefill_only.types import FloatArray, SparseVector, Task
from cfg_core.prefill_only.workflow import resolve


class Runner(Protocol):
    """Computes batches for the engine, with transformers (below) or with vLLM (vllm_runner.py)."""

    tasks: tuple[Task, ...]
    first_position: int
    uses_token_types: bool
    max_positions: int | None
    dimension: int | None
    token_dimension: int | None
    dtype: torch.dtype
    on_gpu: bool

    def compute(self, batch: PackedBatch) -> Values:
        """Compute a batch of host tensors; blocks until the values are on the host.

        Only one thread calls it.
        """
        ...

    def close(self) -> None: ...


class TransformersRunner:
    """A transformers model with packed attention, and the poolers of its tasks."""

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, special_ids: frozenset[int]
    ) -> None:
        check_family(checkpoint, options)
        self._device = choose_device(options)
        self.on_gpu = self._device.type == "cuda"
        self._num_threads = options.num_threads
        self.dtype = choose_dtype(options, self._device, checkpoint.model_type)
        model = load_model(
            checkpoint,
            attention=self._attention(checkpoint, options.workflow.get("attention")),
            device=self._device,
            dtype=self.dtype,
            causal=is_causal(checkpoint, options),
            quantization=options.quantization,
        )
        self._backbone = packed(backbone_of(model), checkpoint.model_type)
        self._extra = {"use_cache": False} if hasattr(self._backbone.config, "use_cache") else {}
        self.first_position = first_position(model)
        self.max_positions = max_positions(self._backbone.config, self.first_position)
        self.uses_token_types = uses_token_types(model)
        self._poolers = make_poolers(checkpoint, model, special_ids)
        self.tasks: tuple[Task, ...] = tuple(self._poolers)
        dense = self._poolers.get("embed")
        self.dimension = dense.dimension if isinstance(dense, DensePooler) else None
        tokens = self._poolers.get("token_embed")
        self.token_dimension = tokens.dimension if isinstance(tokens, TokenPooler) else None

    def _attention(self, checkpoint: Checkpoint, name: str | None) -> str:
        if checkpoint.model_type in OWN_ATTENTION:
            return "eager"
        flash = self.on_gpu and self.dtype != torch.float32  # which flash attention does not take
        name = name or ("varlen" if flash else "sdpa_runs")
        return attention.install(name.replace(":", "."), resolve("attention", name))

    @torch.inference_mode()
    def compute(self, batch: PackedBatch) -> Values:
        if not self.on_gpu and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)  # holds for the calling thread only
        batch = batch.to(self._device)
        rows = {"input_ids": batch.token_ids, "position_ids": batch.position_ids}
        if batch.token_type_ids is not None:
            rows["token_type_ids"] = batch.token_type_ids
        if not self.on_gpu:
            num_more = rows_of(batch.num_tokens) - batch.num_tokens  # of token 0, dropped below
            rows = {name: functional.pad(tensor, (0, num_more)) for name, tensor in rows.items()}
        output = self._backbone(**rows, plan=batch.plan, **self._extra)
        return self._pooled(output.last_hidden_state[0, : batch.num_tokens], batch)

    def _pooled(self, states: torch.Tensor, batch: PackedBatch) -> Values:
        values: dict[Task, list[FloatArray | SparseVector | None]] = {}
        for task, pooler in self._poolers.items():
            wanted = [
                i for i, sequence in enumerate(batch.sequences) if task in sequence.options.tasks
            ]
            if wanted:
                values[task] = [None] * len(batch.sequences)
                for i, value in zip(wanted, pooler(states, batch, wanted), strict=True):
                    values[task][i] = value
        return values

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
