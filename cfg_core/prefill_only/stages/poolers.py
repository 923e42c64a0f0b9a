"""Poolers turn token states into the values of a task, on the device and over packed rows.

There is one pooler for each task. Shapes: T tokens, N sequences, D components of a state,
V vocabulary, L labels. All results are float32 on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from cfg_core.errors import CompatibilityError, ConfigError
from cfg_core.prefill_only.batch import PackedBatch
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.models.cpu_linear import PackedLinear
from cfg_core.prefill_only.models.loading import backbone_of
from cfg_core.prefill_only.models.settings import DenseLayer
from cfg_core.prefill_only.types import FloatArray, SparseVector, Task

Pooler = Callable[[torch.Tensor, PackedBatch, Sequence[int]], Sequence[FloatArray | SparseVector]]
"""(states [T, D], batch, wanted) -> one result for each index in `wanted`.

wanted: the indices of the sequences that ask for the task.
"""


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
    poolers: dict[Task, Pooler] = {
        "embed": DensePooler(checkpoint, model),
        "token_embed": token_pooler(),
    }
    if checkpoint.has_bge_m3_heads:
        like = next(model.parameters())
        sparse = _linear_file(checkpoint, "sparse_linear.pt", like)
        poolers["sparse"] = lexical_pooler(sparse, special_ids)
        poolers["token_embed"] = token_pooler(_linear_file(checkpoint, "colbert_linear.pt", like))
    return poolers


def _host(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def _segments(batch: PackedBatch) -> torch.Tensor:
    """int64 [T]: the index of the sequence that a row belongs to."""
    return torch.repeat_interleave(batch.lengths, output_size=batch.num_tokens)


# ---- dense ---------------------------------------------------------------------------------------


class DensePooler:
    """Computes one vector for each sequence: pooled states, then the checkpoint's Dense layers."""

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        self._poolings = checkpoint.poolings
        self._skips_prompt = not checkpoint.include_prompt
        like = next(model.parameters())
        self._layers = [_dense_layer(layer).to(like.device) for layer in checkpoint.dense]
        width = int(backbone_of(model).config.hidden_size)
        self.dimension = (
            self._layers[-1][0].out_features if self._layers else width * len(self._poolings)
        )

    def __call__(
        self, states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> Sequence[FloatArray]:
        skipped = _prompt_lengths(batch, states.device) if self._skips_prompt else None
        vectors = torch.cat([pool(name, states, batch, skipped) for name in self._poolings], -1)
        for layer in self._layers:
            vectors = layer(vectors)
        return list(_host(vectors[list(wanted)]))


def _prompt_lengths(batch: PackedBatch, device: torch.device) -> torch.Tensor:
    """int64 [N]: how many leading rows are not pooled. At least one row of a sequence is left."""
    return torch.tensor([min(s.prompt_length, len(s) - 1) for s in batch.sequences], device=device)


def pool(
    name: str, states: torch.Tensor, batch: PackedBatch, skipped: torch.Tensor | None = None
) -> torch.Tensor:
    """Pool states [T, D] to float32 [N, D], by the pooling `name`.

    skipped: int64 [N], how many leading rows of each sequence are left out.
    """
    starts, ends = batch.plan.cu_seq_lens[:-1].long(), batch.plan.cu_seq_lens[1:].long()
    if name == "last":
        return states[ends - 1].float()
    if name == "cls":
        return states[starts if skipped is None else starts + skipped].float()
    positions = torch.arange(len(states), device=states.device) - starts.repeat_interleave(
        batch.lengths
    )
    kept = torch.ones_like(positions, dtype=torch.bool)
    if skipped is not None:
        kept = positions >= skipped.repeat_interleave(batch.lengths)
    if name == "max":
        return _maximum(states.float().masked_fill(~kept[:, None], float("-inf")), batch)
    weights = kept * (positions + 1.0) if name == "weightedmean" else kept.float()
    return _weighted(states, weights, batch, root=name == "mean_sqrt_len_tokens")


def _maximum(rows: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    empty = torch.full((len(batch.lengths), rows.shape[1]), float("-inf"), device=rows.device)
    return empty.scatter_reduce(0, _segments(batch)[:, None].expand_as(rows), rows, "amax")


def _weighted(
    states: torch.Tensor, weights: torch.Tensor, batch: PackedBatch, *, root: bool
) -> torch.Tensor:
    """The sum of weighted rows, divided by the sum of weights, or by its square root if `root`."""
    segments = _segments(batch)
    sums = torch.zeros(len(batch.lengths), states.shape[1], device=states.device)
    sums.index_add_(0, segments, states.float() * weights[:, None])
    totals = torch.zeros(len(batch.lengths), device=states.device).index_add_(0, segments, weights)[
        :, None
    ]
    return sums / (totals.sqrt() if root else totals)


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
        {name.removeprefix("linear."): value.float() for name, value in weights.items()}
    )
    return nn.Sequential(linear, getattr(nn, layer.activation)()).eval()


# ---- tokens and sparse weights -------------------------------------------------------------------


def token_pooler(head: nn.Linear | None = None) -> Pooler:
    """One vector for each token.

    With bge-m3's head, the first token has no vector, as in its authors' code.
    """
    first = 0 if head is None else 1

    def pool_tokens(
        states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> list[FloatArray | SparseVector]:
        vectors, rows = _host(states if head is None else head(states)), batch.rows()
        return [vectors[rows[i]][first:] for i in wanted]

    return pool_tokens


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
        weights, rows = _host(torch.relu(head(states))[:, 0]), batch.rows()
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
        return SparseVector(tokens.cpu().numpy(), _host(vector[tokens]))

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


# ---- heads of transformers -----------------------------------------------------------------------


class HeadOnRows:
    """Runs the head of a transformers model on states that are already computed.

    The backbone is replaced by a stub that returns those states, and the model's own forward is
    called. So the code that each head was trained with computes it, whatever its layers are.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stub = _GivenStates(backbone_of(model))
        setattr(model, model.base_model_prefix, self._stub)
        pad = getattr(model.config, "pad_token_id", None)
        # Decoder classifiers look for the last token that is not padding.
        self._dummy_id = 0 if pad != 0 else 1

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of the states [n, t, D] of n sequences of t tokens.

        A classifier gives [n, L], a language model [n, t, V].
        """
        self._stub.states = states
        ids = torch.full(states.shape[:2], self._dummy_id, dtype=torch.long, device=states.device)
        logits: torch.Tensor = self._model(input_ids=ids).logits
        return logits


class _GivenStates(nn.Module):
    """Stands in for a backbone: it returns `states` for any arguments.

    If the backbone has a pooler, it also returns that pooler's output for `states`.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.pooler = getattr(backbone, "pooler", None)
        if isinstance(self.pooler, nn.Linear | PackedLinear):  # ALBERT's
            self.pooler = _FirstToken(self.pooler, backbone.pooler_activation)
        self.config = backbone.config
        self.states = torch.empty(0)

    def forward(self, *args: object, **kwargs: object) -> object:
        from transformers.modeling_outputs import (
            BaseModelOutputWithPoolingAndCrossAttentions as BackboneOutput,
        )

        pooled = None if self.pooler is None else self.pooler(self.states)
        return BackboneOutput(last_hidden_state=self.states, pooler_output=pooled)


class _FirstToken(nn.Module):
    """A pooler of states [n, t, D] that is a linear layer on the first token."""

    def __init__(self, linear: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.activation(self.linear(states[:, 0]))
        return pooled


def classify_pooler(model: Any) -> Pooler:
    """Logits [L] of sequence classifiers and rerankers.

    The head is run on the one state that it reads, or, for the pooling `late`, on each state.
    """
    pooling, head = _classifier_pooling(model), HeadOnRows(model)

    def pool_logits(
        states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> list[FloatArray | SparseVector]:
        if pooling == "late":  # the mean of each token's logits
            logits = pool("mean", head(states[:, None]), batch)
        else:
            logits = head(pool(pooling, states, batch).to(states.dtype)[:, None])
        return list(_host(logits[list(wanted)]))

    return pool_logits


def logit_score_pooler(model: Any) -> Pooler:
    """Score [1] of language models: the logit of yes minus that of no, after the last token.

    With one token, its logit is the score.
    """
    head = HeadOnRows(model)

    def pool_scores(
        states: torch.Tensor, batch: PackedBatch, wanted: Sequence[int]
    ) -> list[FloatArray | SparseVector]:
        logits = head(pool("last", states, batch)[list(wanted), None])[:, 0]  # float32 [n, 1 or 2]
        return list(_host(logits[:, -1:] - logits[:, :1] if logits.shape[1] == 2 else logits))

    return pool_scores


def _classifier_pooling(model: Any) -> str:
    """cls, mean, last or late: the pooling that the classifier uses.

    With `late` the head is run on each token, and the logits are averaged.
    """
    if hasattr(model, "score"):
        return "last"
    named = getattr(model.config, "classifier_pooling", None)
    if named in (None, "cls", "bos"):
        return "cls"
    if named in ("mean", "late"):
        return str(named)
    raise CompatibilityError(
        f"classifier_pooling {named!r} is not supported: use cls, bos, mean or late."
    )
