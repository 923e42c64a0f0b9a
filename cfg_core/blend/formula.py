"""The blend: combines the distributions of a group's streams into one.

    guided = negative + s * (conditional - negative)        on log-softmax, classifier-free guidance
    guided = sum_i w_i * log p_i,  sum_i w_i = 1             in general

Source: arXiv 2306.17806 ("Stay on topic with Classifier-Free Guidance"), equation 7.
`UnbatchedClassifierFreeGuidanceLogitsProcessor` of Hugging Face transformers computes the same. The
result is unnormalised log-probabilities, which a sampler takes as logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cfg_core.params import Cuts

NEVER = float("-inf")
LEAST = -1e30
"""Instead of a forbidden token's log-probability where a product with 0 has to be 0."""

LARGEST_WEIGHT = 1e20
"""Weights are clamped to this magnitude, so that the blend stays finite in float32.

At such weights only the difference between the streams matters.
"""

CUT_GAP = 1e3
"""How far cut tokens are below the least likely token that is kept, in units of its score.

Temperatures up to 100 do not bring them back.
"""


def blend(logits_SGV: torch.Tensor, weights_SG: torch.Tensor) -> torch.Tensor:
    """Blend the streams of G groups, and return [groups, vocabulary] float32.

    logits_SGV: [streams, groups, vocabulary], any float dtype. Stream 0 is the leader. `blend` does
        not change it.
    weights_SG: [streams, groups] float32. Each column sums to 1. A weight may be any real number,
        and infinite if it overflowed float32.

    A token that the leader forbids (-inf) stays forbidden whatever the weights are. Where only a
    follower forbids a token, the leader's log-probability is used for that follower. So no weight,
    0 and negative ones included, turns a forbidden token into NaN or +inf.
    """
    weights_SG = weights_SG.clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
    logp_SGV = torch.log_softmax(logits_SGV.float(), dim=-1)
    leader_GV, followers_FGV = logp_SGV[0], logp_SGV[1:]
    followers_FGV = torch.where(followers_FGV == NEVER, leader_GV, followers_FGV)
    # The sum is written as differences from the first follower. For a pair this is exactly the
    # formula of the paper, so it also rounds like that formula.
    anchor_GV = followers_FGV[0]
    guided_GV = anchor_GV + weights_SG[0].unsqueeze(-1) * (leader_GV - anchor_GV)
    for follower_GV, weight_G in zip(followers_FGV[1:], weights_SG[2:], strict=True):
        guided_GV += weight_G.unsqueeze(-1) * (follower_GV - anchor_GV)
    return torch.where(leader_GV == NEVER, NEVER, guided_GV)


class CutRows(NamedTuple):
    """Which rows are cut, and how.

    rows: [c] int64, their places among the blended rows.
    top_k, filter_top_k: [c, 1] int64; 0 where there is no such cut.
    min_p: [c, 1] float32, logarithms; -inf where there is no such cut.
    largest: the largest numbers of `top_k` and of `filter_top_k`.
    """

    rows: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    filter_top_k: torch.Tensor
    largest: tuple[int, int]

    @classmethod
    def of(
        cls, cuts: Sequence[Cuts | None], put: Callable[[Any, Any], torch.Tensor]
    ) -> CutRows | None:
        """The cuts of rows, in order; None if no row is cut.

        put: makes a tensor of values and a numpy dtype.
        """
        rows = [row for row, own in enumerate(cuts) if own is not None]
        own = [one for one in cuts if one is not None]
        if not own:
            return None
        top_k, filter_top_k = (
            [one.top_k or 0 for one in own],
            [one.filter_top_k or 0 for one in own],
        )
        min_p = [NEVER if one.min_p is None else math.log(one.min_p) for one in own]
        return cls(
            rows=put(rows, np.int64),
            top_k=put([[k] for k in top_k], np.int64),
            min_p=put([[share] for share in min_p], np.float32),
            filter_top_k=put([[k] for k in filter_top_k], np.int64),
            largest=(max(top_k), max(filter_top_k)),
        )

    def part(self, part: slice) -> CutRows:
        """Some of the rows."""
        return self._replace(
            rows=self.rows[part],
            top_k=self.top_k[part],
            min_p=self.min_p[part],
            filter_top_k=self.filter_top_k[part],
        )


def cut(leader_CV: torch.Tensor, guided_CV: torch.Tensor, cuts: CutRows) -> torch.Tensor:
    """Return the rows that are sampled, [c, vocabulary] float32 (see `cfg_core.params.Cuts`).

    leader_CV: [c, vocabulary], the leaders' logits.
    guided_CV: [c, vocabulary] float32, the blend.

    The other tokens are not forbidden. They are put far below the least likely token that is kept,
    in their order. So no mask that is applied later can leave a row without any token.
    """
    leader_CV = torch.log_softmax(leader_CV.float(), dim=-1)
    kept_CV = leader_CV >= leader_CV.amax(-1, keepdim=True) + cuts.min_p
    kept_CV &= _is_among_highest(leader_CV, cuts.top_k, cuts.largest[0])
    guided_CV = _keep(guided_CV, kept_CV)
    filters_C1 = cuts.filter_top_k > 0
    kept_CV &= _is_among_highest(guided_CV, cuts.filter_top_k, cuts.largest[1])
    return _keep(torch.where(filters_C1, leader_CV, guided_CV), kept_CV)


def divergence(guided_NV: torch.Tensor, leader_NV: torch.Tensor) -> torch.Tensor:
    """Return KL(guided || leader) of each row in nats, [n] float32. Both are logits [n, V]."""
    guided_NV = torch.log_softmax(guided_NV.float(), dim=-1)
    leader_NV = torch.log_softmax(leader_NV.float(), dim=-1)
    terms_NV = guided_NV.exp() * (guided_NV - leader_NV)
    return torch.where(guided_NV == NEVER, 0.0, terms_NV).sum(-1)


def _is_among_highest(scores_CV: torch.Tensor, k_C1: torch.Tensor, largest: int) -> torch.Tensor:
    """Whether each score is one of the k highest of its row, or equal to the k-th. True for k 0."""
    most = min(largest, scores_CV.shape[-1])
    if most == 0:
        return torch.ones_like(scores_CV, dtype=torch.bool)
    highest = scores_CV.topk(most).values
    lowest_C1 = highest.gather(-1, k_C1.clamp(1, most) - 1)
    return (scores_CV >= lowest_C1) | (k_C1 == 0)


def _keep(scores_CV: torch.Tensor, kept_CV: torch.Tensor) -> torch.Tensor:
    """Put the scores that are not kept far below those that are, in their order."""
    possible_CV = kept_CV & (scores_CV != NEVER)
    lowest_C1 = torch.where(possible_CV, scores_CV, -NEVER).amin(-1, keepdim=True)
    gap_C1 = CUT_GAP * lowest_C1.abs().clamp(min=10.0)
    below_CV = lowest_C1 - gap_C1 + (scores_CV - scores_CV.amax(-1, keepdim=True))
    return torch.where(kept_CV, scores_CV, below_CV)
