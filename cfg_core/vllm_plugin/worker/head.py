"""The blend before the model's head: one row of logits for each group, not one for each stream.

The head is the last layer, from hidden states to logits. If it is affine, `logits = W h + b`, and
the weights of a group sum to 1, then

    sum_i w_i * log_softmax(W h_i + b)  =  W (sum_i w_i * h_i) + b  -  constant

with the same constant for all tokens: the weighted sum of the streams' normalisers. Nothing that
reads only differences of logits can tell, and those are temperature, top-k, top-p, min-p, additive
penalties, grammars, and vLLM's own log-probabilities. So the head is computed for one row, and no
row of the vocabulary's size is blended. Groups that need more (`Group.needs_rows`) and heads that
are not affine, such as soft-capped ones, are blended after the head (rows.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed import get_tp_group

from cfg_core.blend import kernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

PROBE_SCALES = (1.0, 64.0)
"""Sizes of the hidden states that `is_affine` tries. A soft cap shows only on large ones."""
PROBE_WEIGHTS = (2.5, -1.5)
LARGEST_WEIGHT = 10.0
"""Larger weights could overflow float16, so their groups are blended after the head."""
LARGEST_LOGIT = 1e30
"""Larger ones are masks, such as the least number of a type. The probe could see nothing beside
them."""


class Head:
    """The head of one model, and whether groups may be blended before it.

    compute_logits: the model's own method, [rows, hidden size] -> [rows, vocabulary]. None on ranks
        that do not get the logits.
    """

    def __init__(self, model: Any, config: VllmConfig) -> None:
        vars(model).pop("compute_logits", None)  # ours, if the same model is loaded again
        self.compute_logits: Callable[[torch.Tensor], torch.Tensor | None] = model.compute_logits
        self.affine = can_merge(config) and all_ranks_agree(
            not has_soft_cap(model)
            and is_affine(
                self.compute_logits,
                config.model_config.get_hidden_size(),
                config.model_config.dtype,
                config.device_config.device,
            )
        )


def can_merge(config: VllmConfig) -> bool:
    """Whether the options of an engine allow to blend before the head.

    With LoRA, vLLM's head finds the adapter of a row by its place. And `raw_logits` and
    `processed_logits` show the values of the guided row.
    """
    model = config.model_config
    return (
        model.runner_type == "generate"
        and config.lora_config is None
        and model.logprobs_mode in ("raw_logprobs", "processed_logprobs")
    )


def has_soft_cap(model: Any) -> bool:
    """Whether a LogitsProcessor of vLLM bounds logits by tanh, which small weights could hide."""
    return any(getattr(part, "soft_cap", None) is not None for part in model.modules())


class Merged(NamedTuple):
    """Index tensors of the rows of hidden states that go through the head: all but the followers of
    groups that are blended before it.

    streams: [streams, k] int64, the rows of hidden states that each of them is made of, the
        leader's first. A row that is no group's leader is made of itself.
    weights: [streams, k] float32. Those of a row that is made of itself are 1, 0, 0...
    source: [rows] int64, for each row its place among the k. A follower has its leader's.
    """

    streams: torch.Tensor
    weights: torch.Tensor
    source: torch.Tensor


def merge(hidden_states: torch.Tensor, merged: Merged) -> torch.Tensor:
    """The rows that go through the head: [rows, hidden size] -> [k, hidden size].

    The blend is computed in float32, and rounded to the type of `hidden_states`. A row that is made
    of itself stays what it is: it gets 1 times the difference to itself.
    """
    if kernel.is_usable(hidden_states.device):
        return kernel.merge_rows(hidden_states, merged.streams, merged.weights)
    streams = hidden_states[merged.streams].float()
    anchor = streams[1]
    blended = anchor + merged.weights[0].unsqueeze(-1) * (streams[0] - anchor)
    for follower, weight in zip(streams[2:], merged.weights[2:], strict=True):
        blended += weight.unsqueeze(-1) * (follower - anchor)
    return blended.to(hidden_states.dtype)


@torch.inference_mode()
def is_affine(
    compute_logits: Callable[[torch.Tensor], Any],
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the head is affine, tried on random hidden states.

    The logits of a blend must be the blend of the logits, within rounding. A head that cannot be
    tried, for example because it has another width than the model, counts as not affine.
    """
    try:
        return _probe(compute_logits, hidden_size, dtype, device)
    except Exception:
        logger.warning("The model's head cannot be tried: groups are blended after it.")
        return False


def _probe(
    compute_logits: Callable[[torch.Tensor], Any],
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    first, second = PROBE_WEIGHTS
    affine = True
    for scale in PROBE_SCALES:
        pair = torch.randn(2, hidden_size, generator=generator) * scale
        states = torch.stack([*pair, first * pair[0] + second * pair[1]]).to(device, dtype)
        logits = compute_logits(states)  # every rank must call it: it may gather
        if logits is None:
            affine = False
            continue
        rows = logits.double()
        expected = first * rows[0] + second * rows[1]
        error, largest = (rows[2] - expected).abs().max(), rows.abs().max()
        allowed = 16 * torch.finfo(dtype).eps * largest
        # False for NaN and infinity, too.
        affine = affine and bool(error <= allowed) and bool(0 < largest < LARGEST_LOGIT)
    return affine


def all_ranks_agree(affine: bool) -> bool:
    """Whether all tensor-parallel ranks found it. They must compute the same rows."""
    group = get_tp_group()
    if group.world_size == 1:
        return affine
    vote = torch.tensor([int(affine)])
    torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())
