"""Strength: how much of the blend's push a token gets, computed from the token's own rows.

    sampled = leader + strength * (blend - leader),  0 <= strength <= 1, on log-softmax

A trust region (`max_kl`) takes the largest strength with KL(sampled || leader) <= max_kl. A gate
(`min_entropy`) takes 0 where the leader is sure of its token. Both are functions of one position's
rows, so drafts stay exact under them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cfg_core.blend.formula import LEAST, NEVER
from cfg_core.params import Strength

ROUNDS = 32
"""The most steps of a row. Four are enough for most rows; after eight the relative error is at most
3e-4 at a spread of logits up to 8. Where logits lie further apart, the divergence has plateaus,
over which only halving leads."""

CLOSE = 1e-4
"""A relative change of the strength that ends the steps of a row. What is left after a step of
Newton's method is about the square of it."""

SMALL = 40.0
"""The largest push, in nats, whose double the exponential function bears in float32."""

SMALLEST = 1e-30
"""Instead of a spread of 0, which no step can be divided by."""


class StrengthRows(NamedTuple):
    """Which rows have a strength of their own, and its limits.

    rows: [s] int64, their places among the blended rows.
    max_kl: [s, 1] float32, nats; infinite where there is no trust region.
    min_entropy: [s, 1] float32, nats; 0 where there is no gate.
    has_regions, has_gates: whether any row has one.
    """

    rows: torch.Tensor
    max_kl: torch.Tensor
    min_entropy: torch.Tensor
    has_regions: bool = True
    has_gates: bool = True

    @classmethod
    def of(
        cls, limits: Sequence[Strength | None], put: Callable[[Any, Any], torch.Tensor]
    ) -> StrengthRows | None:
        """The limits of rows, in order; None if no row has any.

        put: makes a tensor of values and a numpy dtype.
        """
        rows = [row for row, own in enumerate(limits) if own is not None and own.limits]
        own = [one for one in limits if one is not None and one.limits]
        if not own:
            return None
        max_kl = [[-NEVER if one.max_kl is None else one.max_kl] for one in own]
        min_entropy = [[one.min_entropy or 0.0] for one in own]
        return cls(
            put(rows, np.int64),
            put(max_kl, np.float32),
            put(min_entropy, np.float32),
            any(one.max_kl is not None for one in own),
            any(one.min_entropy is not None for one in own),
        )

    def part(self, part: slice) -> StrengthRows:
        """Some of the rows."""
        return self._replace(
            rows=self.rows[part], max_kl=self.max_kl[part], min_entropy=self.min_entropy[part]
        )


def weaken(
    leader_SV: torch.Tensor, blend_SV: torch.Tensor, limits: StrengthRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that are sampled [s, vocabulary] float32, and their strengths [s] float32.

    leader_SV: [s, vocabulary], the leaders' logits.
    blend_SV: [s, vocabulary] float32, the blend. What the leader forbids is forbidden in both.
    """
    leader_SV = torch.log_softmax(leader_SV.float(), dim=-1)
    push_SV = torch.where(leader_SV == NEVER, 0.0, blend_SV - leader_SV)
    strength_S1 = torch.ones_like(push_SV[:, :1])
    if limits.has_regions:
        strength_S1 = largest_strength(leader_SV, push_SV, limits.max_kl)
    if limits.has_gates:
        sure_S1 = entropy(leader_SV).unsqueeze(-1) < limits.min_entropy
        strength_S1 = torch.where(sure_S1, 0.0, strength_S1)
    sampled_SV = torch.addcmul(leader_SV, push_SV, strength_S1)
    return torch.where(strength_S1 == 1, blend_SV, sampled_SV), strength_S1[:, 0]


def largest_strength(
    leader_SV: torch.Tensor, push_SV: torch.Tensor, max_kl_S1: torch.Tensor
) -> torch.Tensor:
    """Return the largest strengths of [0, 1] whose divergence is at most `max_kl_S1`, [s, 1].

    leader_SV: log-probabilities. push_SV: finite, the same shape.

    A CPU, which nobody waits for, searches only for rows whose limit binds.
    """
    tilted = _Tilted.of(leader_SV, push_SV)
    if push_SV.device.type != "cpu":
        whole_S1, _ = tilted.divergence(tilted.size_S1)
        found_S1 = _search(tilted, whole_S1, max_kl_S1) / tilted.size_S1
        return torch.where(whole_S1 <= max_kl_S1, 1.0, found_S1)
    strength_S1 = torch.ones_like(max_kl_S1)
    is_small_S = tilted.size_S1[:, 0] <= SMALL
    for rows, is_small in ((_places(is_small_S), True), (_places(~is_small_S), False)):
        if len(rows):
            strength_S1[rows] = _largest(tilted.rows(rows, is_small), max_kl_S1[rows])
    return strength_S1


def _largest(tilted: _Tilted, max_kl_S1: torch.Tensor) -> torch.Tensor:
    """As `largest_strength`, on a CPU."""
    whole_S1, _ = tilted.divergence(tilted.size_S1)
    strength_S1 = torch.ones_like(whole_S1)
    rows = _places(~(whole_S1 <= max_kl_S1)[:, 0])
    if len(rows):
        own = tilted.rows(rows, tilted.is_small)
        strength_S1[rows] = _search(own, whole_S1[rows], max_kl_S1[rows]) / own.size_S1
    return strength_S1


def _places(chosen_S: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(chosen_S)[:, 0]


def _search(tilted: _Tilted, whole_S1: torch.Tensor, max_kl_S1: torch.Tensor) -> torch.Tensor:
    """The t of [0, size] whose divergence is `max_kl_S1`, [s, 1].

    whole_S1: the divergence at `size`. Where it is below the limit, the result means nothing.

    KL grows with t, from about t^2 var / 2. So its root is nearly straight, and Newton's method on
    the root needs few steps. It begins where a parabola through both ends is as high as the limit.
    A step that leaves what is known to be too little and too much is replaced by the middle, as
    ratios go. A row whose t hardly moves keeps it, so it does not depend on other rows.
    """
    wanted_S1, size_S1 = (2 * max_kl_S1).sqrt(), tilted.size_S1
    low_S1, high_S1 = torch.zeros_like(size_S1), size_S1
    slope_S1 = tilted.variance_S1.sqrt()
    bend_S1 = ((2 * whole_S1).sqrt() / size_S1 - slope_S1) / size_S1
    tilt_S1 = (slope_S1**2 + 4 * bend_S1 * wanted_S1).clamp(min=0).sqrt()
    t_S1 = torch.minimum(2 * wanted_S1 / (slope_S1 + tilt_S1).clamp(min=SMALLEST), size_S1)
    is_done_S1 = torch.zeros_like(t_S1, dtype=torch.bool)
    for _ in range(ROUNDS):
        kl_S1, variance_S1 = tilted.divergence(t_S1)
        is_low_S1 = kl_S1 <= max_kl_S1
        low_S1, high_S1 = (
            torch.where(is_low_S1, t_S1, low_S1),
            torch.where(is_low_S1, high_S1, t_S1),
        )
        root_S1 = (2 * kl_S1).sqrt()
        slope_S1 = t_S1 * variance_S1 / root_S1.clamp(min=SMALLEST)
        newton_S1 = t_S1 - (root_S1 - wanted_S1) / slope_S1
        middle_S1 = torch.where(low_S1 > 0, (low_S1 * high_S1).sqrt(), high_S1 / 4)
        is_known_S1 = (newton_S1 >= low_S1) & (newton_S1 <= high_S1) & (kl_S1 > 0)
        next_S1 = torch.where(is_known_S1, newton_S1, middle_S1)
        has_moved_S1 = (next_S1 - t_S1).abs() > CLOSE * t_S1
        t_S1 = torch.where(is_done_S1, t_S1, next_S1)
        is_done_S1 = is_done_S1 | ~has_moved_S1
        if t_S1.device.type == "cpu" and is_done_S1.all():
            break
    return t_S1


def entropy(logp_NV: torch.Tensor) -> torch.Tensor:
    """Return the entropy of rows of log-probabilities [n, vocabulary], in nats: [n]."""
    negative_N: torch.Tensor = torch.linalg.vecdot(logp_NV.exp(), logp_NV.clamp(min=LEAST))
    return -negative_N


class _Tilted(NamedTuple):
    """p_t = softmax(leader + t push), for rows of log-probabilities and pushes.

    push_SV: in units of `size_S1`, the largest push of a row, so that squares of 1e20 are finite;
        and around its mean, because a constant changes nothing but the rounding.
    squares_SV: of `push_SV`.
    variance_S1: of the push at t = 0.
    is_small: whether no push is above SMALL. The divergence is simpler then.
    """

    leader_SV: torch.Tensor
    push_SV: torch.Tensor
    squares_SV: torch.Tensor
    size_S1: torch.Tensor
    variance_S1: torch.Tensor
    is_small: bool = False

    @classmethod
    def of(cls, leader_SV: torch.Tensor, push_SV: torch.Tensor) -> _Tilted:
        """leader_SV: log-probabilities. push_SV: finite, the same shape."""
        size_S1 = push_SV.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
        p_SV, push_SV = leader_SV.exp(), push_SV / size_S1
        push_SV -= torch.linalg.vecdot(p_SV, push_SV).unsqueeze(-1)
        squares_SV = push_SV**2
        variance_S1 = torch.linalg.vecdot(p_SV, squares_SV).unsqueeze(-1)
        return cls(leader_SV, push_SV, squares_SV, size_S1, variance_S1)

    def rows(self, rows: torch.Tensor, is_small: bool) -> _Tilted:
        """Some of the rows, [n] int64, in order."""
        if len(rows) == len(self.size_S1):
            return self._replace(is_small=is_small)
        return _Tilted(
            self.leader_SV[rows],
            self.push_SV[rows],
            self.squares_SV[rows],
            self.size_S1[rows],
            self.variance_S1[rows],
            is_small,
        )

    def divergence(self, t_S1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """KL(p_t || leader) and the variance of the push under p_t: [s, 1] each.

        The variance times t is the slope of the divergence over t.
        """
        if self.is_small:  # the sum of p is at least 1, because the push has the mean 0
            p_SV = torch.addcmul(self.leader_SV, self.push_SV, t_S1).exp_()
            total_S1 = p_SV.sum(-1, keepdim=True)
            mean_S1, square_S1 = self._means(p_SV, total_S1)
            kl_S1 = t_S1 * mean_S1 - total_S1.log()
        else:
            leader_SV = self.leader_SV.clamp(min=LEAST)
            logp_SV = torch.addcmul(leader_SV, self.push_SV, t_S1)
            logp_SV -= logp_SV.amax(-1, keepdim=True)  # up to the logarithm of `total`
            p_SV = logp_SV.exp()
            total_S1 = p_SV.sum(-1, keepdim=True)
            mean_S1, square_S1 = self._means(p_SV, total_S1)
            grown_S1 = torch.linalg.vecdot(p_SV, logp_SV.sub_(leader_SV)).unsqueeze(-1)
            kl_S1 = grown_S1 / total_S1 - total_S1.log()
        return kl_S1.clamp(min=0), (square_S1 - mean_S1**2).clamp(min=0)

    def _means(
        self, p_SV: torch.Tensor, total_S1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The means of the push and of its square, under weights whose sum is `total_S1`."""
        return (
            torch.linalg.vecdot(p_SV, self.push_SV).unsqueeze(-1) / total_S1,
            torch.linalg.vecdot(p_SV, self.squares_SV).unsqueeze(-1) / total_S1,
        )
