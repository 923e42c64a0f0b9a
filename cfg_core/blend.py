"""The blend: combines the distributions of a group's streams into one.

    guided = negative + s * (conditional - negative)        on log-softmax, classifier-free guidance
    guided = sum_i w_i * log p_i,  sum_i w_i = 1             in general

Source: arXiv 2306.17806 ("Stay on topic with Classifier-Free Guidance"), equation 7.
`UnbatchedClassifierFreeGuidanceLogitsProcessor` of Hugging Face transformers computes the same. The
result is unnormalised log-probabilities, which a sampler takes as logits.
"""

from __future__ import annotations

import torch

NEVER = float("-inf")
LARGEST_WEIGHT = 1e20
"""Weights are clamped to this magnitude, so that the blend stays finite in float32.

At such weights only the difference between the streams matters.
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
