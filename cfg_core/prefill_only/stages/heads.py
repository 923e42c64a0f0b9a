"""Poolers of scores: heads of transformers' models, run on states that are already computed.

Shapes: T tokens, N sequences, D components of a state, V vocabulary, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cfg_core.errors import CompatibilityError
from cfg_core.prefill_only.batch import PackedBatch
from cfg_core.prefill_only.models.cpu_linear import PackedLinear
from cfg_core.prefill_only.models.loading import backbone_of
from cfg_core.prefill_only.stages.pooling import Pooler, host, pool
from cfg_core.prefill_only.types import FloatArray, SparseVector


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
        return list(host(logits[list(wanted)]))

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
        return list(host(logits[:, -1:] - logits[:, :1] if logits.shape[1] == 2 else logits))

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
