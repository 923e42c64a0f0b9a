"""Forwards for models whose own attention takes no attention function of ours.

A backbone is called as the packed forward of transformers' other models:

    backbone(input_ids=[1, T], position_ids=[1, T], plan=..., token_type_ids=[1, T] or left out)

It returns an object with `last_hidden_state` [1, T, D]. T may have more rows than the plan's
sequences; their states are not used.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from cfg_core.prefill_only.batch import AttentionPlan, EqualLengthRun
from cfg_core.prefill_only.models.families import BY_RUNS


def packed(backbone: Any, kind: str) -> Any:
    """`backbone`, or what computes it for packed sequences."""
    if kind == "mpnet":
        return PackedMPNet(backbone)
    return RunsOfBackbone(backbone) if kind in BY_RUNS else backbone


def _rows(run: EqualLengthRun) -> slice:
    return slice(run.start, run.start + run.num * run.length)


class RunsOfBackbone(nn.Module):
    """The model's own forward, called for the sequences of one length at a time.

    Nothing is padded, so any model is exact. Products of matrices have fewer rows than in a packed
    batch, which costs speed where lengths differ much.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = backbone.config

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        plan: AttentionPlan,
        token_type_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> SimpleNamespace:
        states = []
        for run in plan.runs:
            rows, shape = _rows(run), (run.num, run.length)
            arguments = {"input_ids": input_ids[0, rows].view(shape)}
            if token_type_ids is not None:
                arguments["token_type_ids"] = token_type_ids[0, rows].view(shape)
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
            arguments["attention_mask"][:, run.keys :] = 0
            output = self.backbone(**arguments, **options)
            states.append(output.last_hidden_state.flatten(0, 1))
        return SimpleNamespace(last_hidden_state=torch.cat(states)[None])


class PackedMPNet(nn.Module):
    """MPNet with packed sequences: its layers, and attention with its relative position bias.

    The bias is added to the scores of each run of sequences of equal length.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = backbone.config
        self._bias = torch.empty(1, 0, 0, 0)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        plan: AttentionPlan,
        token_type_ids: None = None,
        **options: Any,
    ) -> SimpleNamespace:
        states = self.backbone.embeddings(input_ids=input_ids, position_ids=position_ids)[0]
        bias = self._bias_of(plan.max_length, states)
        for layer in self.backbone.encoder.layer:
            attended = _attend(layer.attention.attn, states, plan, bias)
            states = layer.attention.LayerNorm(attended + states)
            states = layer.output(layer.intermediate(states), states)
        return SimpleNamespace(last_hidden_state=states[None])

    def _bias_of(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """[1, H, n, n], n >= length. It depends on distances only, so a corner fits any length."""
        if self._bias.shape[-1] < length:
            rows = like.new_empty(1, length, 1)
            self._bias = self.backbone.encoder.compute_position_bias(rows)
        return self._bias


def _attend(
    attention: Any, states: torch.Tensor, plan: AttentionPlan, bias: torch.Tensor
) -> torch.Tensor:
    """Self-attention of states [T, D] with `bias`, by MPNet's layers q, k, v and o."""
    heads = attention.num_attention_heads
    parts = [layer(states) for layer in (attention.q, attention.k, attention.v)]
    attended = torch.zeros_like(states)
    for run in plan.runs:
        rows = _rows(run)
        query, key, value = (
            part[rows].view(run.num, run.length, heads, -1).transpose(1, 2) for part in parts
        )
        keys = run.keys
        corner = bias[:, :, : run.length, :keys]
        result = functional.scaled_dot_product_attention(
            query, key[:, :, :keys], value[:, :, :keys], attn_mask=corner
        )
        attended[rows] = result.transpose(1, 2).reshape(run.num * run.length, -1)
    output: torch.Tensor = attention.o(attended)
    return output
