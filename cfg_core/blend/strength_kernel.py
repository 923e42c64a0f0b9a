"""The strength of tokens as a Triton kernel, for GPUs. strength.py defines what it computes.

PyTorch's way reads two rows of the vocabulary's size a dozen times, with a dozen launches and as
many temporary tensors each time. Here one program computes one row, in one launch. A reading of the
rows gives the three sums that a Newton step needs; a row that fits its trust region as it is, or
whose gate is closed, is read only twice.
"""

from __future__ import annotations

import torch

from cfg_core.blend.strength import LEAST, ROUNDS, SMALLEST, StrengthRows

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every system
    triton = None

BLOCK = 2048
"""Tokens of a row that are handled at a time."""


def weaken_rows(
    leader_SV: torch.Tensor, out_RV: torch.Tensor, places_S: torch.Tensor, limits: StrengthRows
) -> torch.Tensor:
    """Replace blended rows of `out_RV` by what is sampled. Returns the strengths, [s] float32.

    leader_SV: [s, vocabulary], the leaders' logits, any float dtype, each row contiguous.
    out_RV: [rows, vocabulary] float32, each row contiguous. Rows that get their whole push stay.
    places_S: [s] int64, the rows of `out_RV`.
    """
    strengths_S = torch.empty(len(places_S), dtype=torch.float32, device=out_RV.device)
    strength_kernel[(len(places_S),)](
        leader_SV,
        out_RV,
        places_S,
        limits.max_kl,
        limits.min_entropy,
        strengths_S,
        leader_SV.shape[-1],
        leader_SV.stride(0),
        out_RV.stride(0),
        BLOCK=BLOCK,
        ROUNDS=ROUNDS,
        LEAST=LEAST,
        SMALLEST=SMALLEST,
    )
    return strengths_S


if triton is not None:
    MUCH = tl.constexpr(16.0)
    """Nats of a push, above which float32 counts it too coarsely to subtract from it."""

    @triton.jit
    def read_rows(leader, blend, normaliser, first, vocabulary, BLOCK: tl.constexpr):
        """A part of a leader's log-probabilities, and of its push; -inf and 0 where forbidden."""
        at = first + tl.arange(0, BLOCK)
        inside = at < vocabulary
        logp = tl.load(leader + at, mask=inside, other=float("-inf")).to(tl.float32) - normaliser
        blended = tl.load(blend + at, mask=inside, other=0.0)
        return logp, tl.where(logp == float("-inf"), 0.0, blended - logp)

    @triton.jit
    def sums_at(
        leader,
        blend,
        normaliser,
        centre,
        size,
        t,
        vocabulary,
        BLOCK: tl.constexpr,
        LEAST: tl.constexpr,
    ):
        """KL(p_t || leader) and the variance of the push, as `strength._divergence` has them.

        The push is counted from `centre` and in units of `size`. With p_t = exp(value) / Z, KL is
        the mean of `t push - log Z`, which is exact where little is pushed, and the mean of
        `value - log Z - leader`, which is exact where much is.
        """
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        mean = tl.full((), 0.0, tl.float32)
        square = tl.full((), 0.0, tl.float32)
        below = tl.full((), 0.0, tl.float32)
        own = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            logp, push = read_rows(leader, blend, normaliser, first, vocabulary, BLOCK)
            never = logp == float("-inf")
            logp = tl.maximum(logp, LEAST)
            unit = tl.where(never, 0.0, (push - centre) / size)
            value = tl.where(never, LEAST, logp + t * unit)
            new_top = tl.maximum(top, tl.max(value, 0))
            kept = tl.exp(top - new_top)
            lower = tl.where(total > 0, kept * (top - new_top), 0.0)
            p = tl.where(never, 0.0, tl.exp(value - new_top))
            below = below * kept + total * lower + tl.sum(p * (value - new_top), 0)
            total = total * kept + tl.sum(p, 0)
            mean = mean * kept + tl.sum(p * unit, 0)
            square = square * kept + tl.sum(p * unit * unit, 0)
            own = own * kept + tl.sum(p * logp, 0)
            top = new_top
        mean = mean / total
        of_little = t * mean - (top + tl.log(total))
        of_much = (below - own) / total - tl.log(total)
        kl = tl.where(tl.abs(t * mean) < MUCH, of_little, of_much)
        return kl, tl.maximum(square / total - mean * mean, 0.0)

    @triton.jit
    def strength_kernel(
        leaders,
        out,
        places,
        max_kls,
        min_entropies,
        strengths,
        vocabulary,
        stride,
        out_stride,
        BLOCK: tl.constexpr,
        ROUNDS: tl.constexpr,
        LEAST: tl.constexpr,
        SMALLEST: tl.constexpr,
    ):
        """One row: `strength.weaken`."""
        row = tl.program_id(0)
        leader = leaders + row * stride
        blend = out + tl.load(places + row) * out_stride
        max_kl = tl.load(max_kls + row)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        mean = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(leader + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(values, 0))
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            kept = tl.exp(top - anchor)
            p = tl.exp(values - anchor)
            total = total * kept + tl.sum(p, 0)
            mean = mean * kept + tl.sum(tl.where(p > 0, p * values, 0.0), 0)
            top = new_top
        normaliser = top + tl.log(total)
        entropy = normaliser - mean / total
        is_sure = entropy < tl.load(min_entropies + row)

        centre = tl.full((), 0.0, tl.float32)
        size = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            logp, push = read_rows(leader, blend, normaliser, first, vocabulary, BLOCK)
            size = tl.maximum(size, tl.max(tl.abs(push), 0))
            centre += tl.sum(tl.exp(logp) * push, 0)
        size = tl.maximum(2 * size, SMALLEST)  # of the push from its centre, at most twice as large

        wanted = tl.sqrt(2 * max_kl)
        kl, variance = sums_at(
            leader, blend, normaliser, centre, size, size, vocabulary, BLOCK, LEAST
        )
        fits = kl <= max_kl
        is_free = fits | is_sure
        t = size
        low = tl.full((), 0.0, tl.float32)
        high = size
        if not is_free:
            kl, variance = sums_at(
                leader, blend, normaliser, centre, size, 0.0, vocabulary, BLOCK, LEAST
            )
            t = tl.minimum(wanted / tl.maximum(tl.sqrt(variance), SMALLEST), size)
            for _ in range(ROUNDS):
                kl, variance = sums_at(
                    leader, blend, normaliser, centre, size, t, vocabulary, BLOCK, LEAST
                )
                is_low = kl <= max_kl
                low = tl.where(is_low, t, low)
                high = tl.where(is_low, high, t)
                root = tl.sqrt(2 * tl.maximum(kl, 0.0))
                slope = t * variance / tl.maximum(root, SMALLEST)
                newton = t - (root - wanted) / slope
                middle = tl.where(low > 0, tl.sqrt(low) * tl.sqrt(high), high / 4)
                is_known = (newton >= low) & (newton <= high)
                t = tl.where(is_known, newton, middle)
        strength = tl.where(is_sure, 0.0, tl.where(fits, 1.0, t / size))
        tl.store(strengths + row, strength)
        if strength < 1.0:
            for first in range(0, vocabulary, BLOCK):
                at = first + tl.arange(0, BLOCK)
                logp, push = read_rows(leader, blend, normaliser, first, vocabulary, BLOCK)
                tl.store(blend + at, logp + strength * push, mask=at < vocabulary)
