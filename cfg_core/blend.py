"""The blend: one distribution out of the distributions of a group's streams.

    guided = negative + s * (conditional - negative)        on log-softmax, classifier-free guidance
    guided = sum_i w_i * log p_i,  sum_i w_i = 1             in general

Source: arXiv 2306.17806 ("Stay on topic with Classifier-Free Guidance"), eq. 7; the same as
`UnbatchedClassifierFreeGuidanceLogitsProcessor` of Hugging Face transformers. The result is
unnormalised log-probabilities: a sampler takes it as logits.
"""

from __future__ import annotations

import torch

NEVER = float("-inf")
LARGEST_WEIGHT = 1e20
"""Weights beyond it are cut to it: the blend is then all difference anyhow, and float32 stays
finite."""


def blend(logits_SGV: torch.Tensor, weights_SG: torch.Tensor) -> torch.Tensor:
    """Blend the streams of G groups.

    logits_SGV: [streams, groups, vocabulary], any float dtype, stream 0 the leader; not changed.
    weights_SG: [streams, groups] float32, each column sums to 1; any real, an overflow to infinity
    included. Returns [groups, vocabulary] float32.

    A token that the leader forbids (-inf) stays forbidden whatever the weights; where only a
    follower forbids it, that follower counts as agreeing with the leader. So `-inf - -inf` never
    happens, and no weight, 0 and negative ones included, makes a NaN or a +inf out of a forbidden
    token.
    """
    weights_SG = weights_SG.clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
    logp_SGV = torch.log_softmax(logits_SGV.float(), dim=-1)
    leader_GV, followers_FGV = logp_SGV[0], logp_SGV[1:]
    followers_FGV = torch.where(followers_FGV == NEVER, leader_GV, followers_FGV)
    # Anchored at the first follower, with differences: for a pair this is to the letter the formula
    # of the paper, also in floating point.
    anchor_GV = followers_FGV[0]
    guided_GV = anchor_GV + weights_SG[0].unsqueeze(-1) * (leader_GV - anchor_GV)
    for follower_GV, weight_G in zip(followers_FGV[1:], weights_SG[2:], strict=True):
        guided_GV += weight_G.unsqueeze(-1) * (follower_GV - anchor_GV)
    return torch.where(leader_GV == NEVER, NEVER, guided_GV)
