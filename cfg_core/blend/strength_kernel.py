"""The limits of the strength as a Triton kernel. strength.py defines what it computes.

PyTorch's way starts about ten kernels for each round of the search, and a GPU must do all rounds
for all rows, as nobody may wait for it. Here a program searches for one row: it reads the row once
a round, and ends when its own row has converged. kernel.py checks it, and says where it is used.
"""

from __future__ import annotations

import torch

from cfg_core.blend.formula import LEAST
from cfg_core.blend.strength import CLOSE, ROUNDS, SMALLEST, StrengthRows

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every system
    triton = None

BLOCK = 2048
"""Tokens of a row that a program handles at a time."""


def weaken_rows(
    leader_SV: torch.Tensor, out_RV: torch.Tensor, places_S: torch.Tensor, limits: StrengthRows
) -> torch.Tensor:
    """As `weaken`, for rows `places_S` of `out_RV`, which are the blend and get what is sampled.

    leader_SV: [s, vocabulary], the leaders' logits, any float dtype, each row contiguous.
    out_RV: [rows, vocabulary] float32, each row contiguous.
    places_S: [s] int64.

    Returns the strengths [s] float32.
    """
    num, vocabulary = leader_SV.shape
    strengths = torch.empty(num, dtype=torch.float32, device=leader_SV.device)
    weaken_kernel[(num,)](
        leader_SV,
        out_RV,
        places_S,
        limits.max_kl,
        limits.min_entropy,
        strengths,
        vocabulary,
        leader_SV.stride(0),
        out_RV.stride(0),
        BLOCK=BLOCK,
        ROUNDS=ROUNDS,
        CLOSE=CLOSE,
        LEAST=LEAST,
        SMALLEST=SMALLEST,
    )
    return strengths


if triton is not None:

    @triton.jit
    def load_row(
        leader, out, first, normaliser, vocabulary, LEAST: tl.constexpr, BLOCK: tl.constexpr
    ):
        """A part of a row: the leader's log-probabilities, at least LEAST, and the push."""
        at = first + tl.arange(0, BLOCK)
        inside = at < vocabulary
        own = tl.load(leader + at, mask=inside, other=float("-inf")).to(tl.float32) - normaliser
        blend = tl.load(out + at, mask=inside, other=0.0)
        never = own == float("-inf")
        return tl.where(never, LEAST, own), tl.where(never, 0.0, blend - own)

    @triton.jit
    def tilt(
        leader,
        out,
        normaliser,
        size,
        mean,
        t,
        vocabulary,
        LEAST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """KL(p_t || leader), and the variance of the push in units of `size` under p_t.

        Each sum is of exp(leader + t push - top) times something, and fades when `top` rises.
        """
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        logs = tl.full((), 0.0, tl.float32)
        pushes = tl.full((), 0.0, tl.float32)
        squares = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            own, push = load_row(leader, out, first, normaliser, vocabulary, LEAST, BLOCK)
            push = push / size - mean
            tilted = own + t * push
            new_top = tl.maximum(top, tl.max(tilted, 0))
            risen = tl.where(top == float("-inf"), 0.0, new_top - top)
            fade = tl.where(top == float("-inf"), 0.0, tl.exp(-risen))
            below = tilted - new_top
            p = tl.exp(below)
            logs = fade * (logs - risen * total) + tl.sum(p * (below - own), 0)
            total = fade * total + tl.sum(p, 0)
            pushes = fade * pushes + tl.sum(p * push, 0)
            squares = fade * squares + tl.sum(p * push * push, 0)
            top = new_top
        divergence = tl.maximum(logs / total - tl.log(total), 0.0)
        average = pushes / total
        return divergence, tl.maximum(squares / total - average * average, 0.0)

    @triton.jit
    def log_sum(start, vocabulary, BLOCK: tl.constexpr):
        """log(sum(exp(row))) of the row from `start`, in one pass."""
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(start + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(values, 0))
            # Without a value yet, the differences below would be NaN.
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - anchor) + tl.sum(tl.exp(values - anchor), 0)
            top = new_top
        return top + tl.log(total)

    @triton.jit
    def moments(
        leader,
        out,
        normaliser,
        vocabulary,
        LEAST: tl.constexpr,
        SMALLEST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """The leader's entropy, the greatest push, and in its units the mean and mean square."""
        size = tl.full((), SMALLEST, tl.float32)
        entropy = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            own, push = load_row(leader, out, first, normaliser, vocabulary, LEAST, BLOCK)
            size = tl.maximum(size, tl.max(tl.abs(push), 0))
            entropy -= tl.sum(tl.exp(own) * own, 0)
        mean = tl.full((), 0.0, tl.float32)
        square = tl.full((), 0.0, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            own, push = load_row(leader, out, first, normaliser, vocabulary, LEAST, BLOCK)
            push = push / size
            mean += tl.sum(tl.exp(own) * push, 0)
            square += tl.sum(tl.exp(own) * push * push, 0)
        return entropy, size, mean, square

    @triton.jit
    def first_guess(kl, size, mean, square, wanted, SMALLEST: tl.constexpr):
        """Where a parabola through both ends of sqrt(2 KL) is as high as wanted."""
        slope = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
        bend = (tl.sqrt(2 * kl) / size - slope) / size
        tilted = tl.sqrt(tl.maximum(slope * slope + 4 * bend * wanted, 0.0))
        return tl.minimum(2 * wanted / tl.maximum(slope + tilted, SMALLEST), size)

    @triton.jit
    def write(leader, out, normaliser, strength, vocabulary, BLOCK: tl.constexpr):
        """Write what is sampled: the leader's log-probabilities and this part of the push."""
        for first in range(0, vocabulary, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < vocabulary
            own = tl.load(leader + at, mask=inside, other=0.0).to(tl.float32) - normaliser
            blend = tl.load(out + at, mask=inside, other=0.0)
            push = tl.where(own == float("-inf"), 0.0, blend - own)
            tl.store(out + at, tl.where(strength == 1, blend, own + strength * push), mask=inside)

    @triton.jit
    def weaken_kernel(
        leaders,
        outs,
        places,
        max_kls,
        min_entropies,
        strengths,
        vocabulary,
        stride,
        out_stride,
        BLOCK: tl.constexpr,
        ROUNDS: tl.constexpr,
        CLOSE: tl.constexpr,
        LEAST: tl.constexpr,
        SMALLEST: tl.constexpr,
    ):
        """The strength of one row, as `cfg_core.blend.strength` finds it, and what is sampled."""
        row = tl.program_id(0)
        leader = leaders + row * stride
        out = outs + tl.load(places + row) * out_stride
        max_kl = tl.load(max_kls + row)
        normaliser = log_sum(leader, vocabulary, BLOCK)
        entropy, size, mean, square = moments(
            leader, out, normaliser, vocabulary, LEAST, SMALLEST, BLOCK
        )
        kl, variance = tilt(leader, out, normaliser, size, mean, size, vocabulary, LEAST, BLOCK)
        binds = kl > max_kl
        wanted = tl.sqrt(2 * max_kl)
        t = first_guess(kl, size, mean, square, wanted, SMALLEST)
        low = tl.full((), 0.0, tl.float32)
        high = size
        step = 0
        moves = binds
        while moves & (step < ROUNDS):
            kl, variance = tilt(leader, out, normaliser, size, mean, t, vocabulary, LEAST, BLOCK)
            low = tl.where(kl <= max_kl, t, low)
            high = tl.where(kl <= max_kl, high, t)
            root = tl.sqrt(2 * kl)
            slope = t * variance / tl.maximum(root, SMALLEST)
            newton = t - (root - wanted) / slope
            middle = tl.where(low > 0, tl.sqrt(low * high), high / 4)
            is_known = (newton >= low) & (newton <= high) & (kl > 0)
            last = t
            t = tl.where(is_known, newton, middle)
            moves = tl.abs(t - last) > CLOSE * last
            step += 1
        strength = tl.where(binds, t / size, 1.0)
        strength = tl.where(entropy < tl.load(min_entropies + row), 0.0, strength)
        tl.store(strengths + row, strength)
        write(leader, out, normaliser, strength, vocabulary, BLOCK)
