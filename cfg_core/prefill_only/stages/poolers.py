"""Poolers turn token states into the values of a task, on the device and over packed rows.

There is one pooler for each task. Shapes: T tokens, N sequences, D components of a state,
V vocabulary, L labels. All results are float32 on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.batch import PackedBatch
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.models.late_interaction import LateInteraction
from cfg_core.prefill_only.models.loading import backbone_of
from cfg_core.prefill_only.models.settings import DenseLayer
from cfg_core.prefill_only.stages.heads import HeadOnRows, classify_pooler, logit_score_pooler
from cfg_core.prefill_only.stages.pooling import Pooler, host, pool
from cfg_core.prefill_only.types import FloatArray, SequenceState, SparseVector, Task


def make_poolers(
    checkpoint: Checkpoint, model: Any, special_ids: frozenset[int]
) -> dict[Task, Pooler]:
    """The pooler of each task of a checkpoint."""
    if checkpoint.head == "classifier":
        return {"classify": classify_pooler(model)}
    if checkpoint.head == "logit_score":
        return {"classify": logit_score_pooler(model)}
    if checkpoint.head == "splade":
        return {"sparse": splade_pooler(checkpoint, model)}
    if checkpoint.head == "late_interaction":
        return {"token_embed": late_pooler(checkpoint, model)}
    poolers: dict[Task, Pooler] = {
        "embed": DensePooler(checkpoint, model),
        "token_embed": TokenPooler(_width(model)),
    }
    if checkpoint.has_bge_m3_heads:
        like = next(model.parameters())
        sparse = _linear_file(checkpoint, "sparse_linear.pt", like)
        poolers["sparse"] = lexical_pooler(sparse, special_ids)
        colbert = _linear_file(checkpoint, "colbert_linear.pt", like)
        poolers["token_embed"] = TokenPooler(colbert.out_features, [colbert], first=1)
    return poolers


# ---- dense ---------------------------------------------------------------------------------------


class DensePooler:
    """Computes one vector for each sequence: pooled states, then the checkpoint's Dense layers."""

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        self._poolings = checkpoint.poolings
        self._skips_prompt = not checkpoint.include_prompt
        like = next(model.parameters())
        self._layers = [_dense_layer(layer).to(like.device) for layer in checkpoint.dense]
        self.dimension = (
            self._layers[-1][0].out_features
            if self._layers
            else _width(model) * len(self._poolings)
        )

    def __call__(
        self, states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> Sequence[FloatArray]:
        skipped = _prompt_lengths(batch, states.device) if self._skips_prompt else None
        vectors = torch.cat([pool(name, states, batch, skipped) for name in self._poolings], -1)
        for layer in self._layers:
            vectors = layer(vectors)
        return list(host(vectors[list(wanted)]))


def _prompt_lengths(batch: PackedBatch, device: torch.device) -> torch.Tensor:
    """int64 [N]: how many leading rows are not pooled. At least one row of a sequence is left."""
    return torch.tensor([min(s.prompt_length, len(s) - 1) for s in batch.sequences], device=device)


def _dense_layer(layer: DenseLayer) -> nn.Sequential:
    file = layer.path / "model.safetensors"
    if file.is_file():
        weights = load_file(file)
    else:
        weights = torch.load(
            layer.path / "pytorch_model.bin", map_location="cpu", weights_only=True
        )
    weight = weights["linear.weight"]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias)
    linear.load_state_dict(
        {
            name.removeprefix("linear."): value.float()
            for name, value in weights.items()
            if name.startswith("linear.")
        }
    )
    return nn.Sequential(linear, getattr(nn, layer.activation)()).eval()


# ---- tokens and sparse weights -------------------------------------------------------------------


class TokenPooler:
    """A vector for each token: its state, after layers that project it.

    first: the first token that has one. With bge-m3's head, the first has none, as in its authors'
    code.
    late: which tokens of documents or queries have none.
    """

    def __init__(
        self,
        dimension: int,
        layers: Sequence[nn.Module] = (),
        *,
        first: int = 0,
        late: LateInteraction | None = None,
    ) -> None:
        self.dimension = dimension
        self._layers, self._first, self._late = layers, first, late

    def __call__(
        self, states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> Sequence[FloatArray | SparseVector]:
        for layer in self._layers:
            states = layer(states)
        vectors, rows = host(states), batch.rows()
        return [self._kept(vectors[rows[i]], batch.sequences[i]) for i in wanted]

    def _kept(self, vectors: FloatArray, sequence: SequenceState) -> FloatArray:
        late = self._late
        if late is None or sequence.options.role not in late.skipped_in or not late.skipped_ids:
            return vectors[self._first :]
        return vectors[[token not in late.skipped_ids for token in sequence.token_ids]]


def late_pooler(checkpoint: Checkpoint, model: Any) -> TokenPooler:
    """The projected vectors of tokens, computed in float32."""
    like = next(model.parameters())
    layers = [_dense_layer(layer).to(like.device) for layer in checkpoint.dense]
    last = layers[-1][0] if layers else None
    dimension = last.out_features if isinstance(last, nn.Linear) else _width(model)
    return TokenPooler(dimension, [_Float32(), *layers], late=checkpoint.late)


class _Float32(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.float()


def _width(model: Any) -> int:
    """Components of a token's state."""
    return int(backbone_of(model).config.hidden_size)


def lexical_pooler(head: nn.Linear, special_ids: frozenset[int]) -> Pooler:
    """bge-m3's sparse weights: for each token id of the text, its largest weight.

    Special tokens have no weight.
    """

    def sparse(token_ids: Sequence[int], weights: FloatArray) -> SparseVector:
        largest: dict[int, float] = {}
        for token, weight in zip(token_ids, weights.tolist(), strict=True):
            if weight <= 0 or token in special_ids:
                continue
            # A NaN is kept, so that it is noticed as a result that is not finite.
            known = largest.get(token, 0.0)
            largest[token] = weight if weight != weight else max(weight, known)
        tokens = sorted(largest)
        return SparseVector(
            np.array(tokens, np.int64), np.array([largest[t] for t in tokens], np.float32)
        )

    def pool_weights(
        states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> list[FloatArray | SparseVector]:
        weights, rows = host(torch.relu(head(states))[:, 0]), batch.rows()
        return [sparse(batch.sequences[i].token_ids, weights[rows[i]]) for i in wanted]

    return pool_weights


def splade_pooler(checkpoint: Checkpoint, model: Any) -> Pooler:
    """SPLADE weights, from the logits of the masked-language-model head.

    A weight is log(1 + relu(logit)), maximised (or summed) over the tokens of the sequence.
    """
    head = HeadOnRows(model)

    def sparse(states: torch.Tensor) -> SparseVector:
        weights = head(states[None])[0].float().relu().log1p()
        if checkpoint.splade_twice:
            weights = weights.log1p()
        vector = weights.sum(0) if checkpoint.splade_sum else weights.amax(0)
        tokens = vector.nonzero()[:, 0]
        return SparseVector(tokens.cpu().numpy(), host(vector[tokens]))

    def pool_weights(
        states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> list[FloatArray | SparseVector]:
        rows = batch.rows()
        return [sparse(states[rows[i]]) for i in wanted]  # one by one: [T, V] would be large

    return pool_weights


def _linear_file(checkpoint: Checkpoint, name: str, like: torch.Tensor) -> nn.Linear:
    weights = torch.load(checkpoint.path / name, map_location="cpu", weights_only=True)
    if set(weights) != {"weight", "bias"}:
        raise ConfigError(f"{name} must hold a weight and a bias, not {', '.join(weights)}.")
    linear = nn.Linear(weights["weight"].shape[1], weights["weight"].shape[0])
    linear.load_state_dict(weights)
    return linear.eval().to(device=like.device, dtype=like.dtype)
