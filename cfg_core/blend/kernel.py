"""The blend as Triton kernels, for GPUs. formula.py defines what they compute for logits.

PyTorch's way allocates several tensors of [streams, groups, vocabulary] in float32, and passes over
each of them. Here the first kernel reads each row once, for its normaliser. The second reads the
rows again, and writes the blend: nothing of the vocabulary's size is allocated. Hidden states are
small, so for them it is the launches that count: one kernel in place of eight.

The limits of the strength have a kernel of their own (strength_kernel.py).

Without Triton there is only PyTorch's way. `check` compares the two once, so that a GPU whose
kernels fail or differ uses PyTorch.
"""

from __future__ import annotations

import logging
import os

import torch

from cfg_core.blend.formula import LARGEST_WEIGHT, NEVER, blend
from cfg_core.blend.strength import StrengthRows, weaken
from cfg_core.blend.strength_kernel import weaken_rows

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every system
    triton = None

logger = logging.getLogger(__name__)

BLOCK = 2048
"""Tokens of a row that one program handles at a time."""

_checked: dict[torch.device, bool] = {}


def check(device: torch.device) -> bool:
    """Find out whether the kernels compute on `device` what PyTorch does; the answer is kept.

    It is used on GPUs, and in Triton's interpreter (TRITON_INTERPRET=1, for tests). This waits for
    the device, so it must not be called within a step.
    """
    device = torch.empty(0, device=device).device  # with its index
    if device not in _checked:
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        usable = triton is not None and (interprets or device.type == "cuda")
        _checked[device] = usable and _is_right(device)
    return _checked[device]


def is_usable(device: torch.device) -> bool:
    """What `check` found for `device`; False before."""
    return _checked.get(device, False)


def _is_right(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, BLOCK + 100, generator=generator) * 5
    logits[0, :50] = logits[1, 25:75] = NEVER
    rows = torch.tensor([[0, 3, 5], [1, 2, 4]])
    weights = torch.tensor([[2.5, 0.5, -1.0], [-1.5, 0.5, 2.0]])
    wanted = blend(logits[rows], weights)
    limits = StrengthRows(
        torch.arange(3),
        torch.tensor([[0.1], [0.5], [9.0]]),
        torch.tensor([[0.0], [0.0], [99.0]]),
    )
    wanted_weak, wanted_strengths = weaken(logits[rows[0]], wanted, limits)
    leaders, weak = logits[rows[0]].to(device), wanted.to(device, copy=True)
    on_device = limits._replace(
        rows=limits.rows.to(device),
        max_kl=limits.max_kl.to(device),
        min_entropy=limits.min_entropy.to(device),
    )
    try:
        given = logits.to(device)
        blend_rows(given, rows.to(device), weights.to(device), given)
        found = given.cpu()[rows[0]]
        states = torch.randn(6, 40, generator=generator)
        merged = merge_rows(states.to(device), rows.to(device), weights.to(device)).cpu()
        weakened = weaken_rows(leaders, weak, on_device.rows, on_device).cpu(), weak.cpu()
    except Exception as error:  # of a compiler or a driver
        logger.warning("Groups are blended by PyTorch, the Triton kernel fails: %s", error)
        return False
    wanted_states = (states[rows] * weights.unsqueeze(-1)).sum(0)
    pairs = (
        (found, wanted),
        (merged, wanted_states),
        (weakened[0], wanted_strengths),
        (weakened[1], wanted_weak),
    )
    if all(torch.allclose(got, want, rtol=1e-3, atol=1e-3) for got, want in pairs):
        return True
    logger.warning("Groups are blended by PyTorch, the Triton kernel gives other values.")
    return False


def blend_rows(
    logits_RV: torch.Tensor, rows_SG: torch.Tensor, weights_SG: torch.Tensor, out_RV: torch.Tensor
) -> None:
    """Write the blend of each group into its leader's row of `out_RV`.

    logits_RV: [rows, vocabulary], any float dtype, each row contiguous.
    rows_SG: [streams, groups] int64, contiguous, the rows of the streams. Stream 0 is the leader.
        No row is in two groups.
    weights_SG: [streams, groups] float32, contiguous; see `blend`.
    out_RV: [rows, vocabulary] float32. It may be `logits_RV` itself.
    """
    (streams, groups), vocabulary = rows_SG.shape, logits_RV.shape[-1]
    normalisers_SG = torch.empty(streams, groups, dtype=torch.float32, device=logits_RV.device)
    normalise_kernel[(streams * groups,)](
        logits_RV, rows_SG, normalisers_SG, vocabulary, logits_RV.stride(0), BLOCK=BLOCK
    )
    blend_kernel[(groups, triton.cdiv(vocabulary, BLOCK))](
        logits_RV,
        out_RV,
        rows_SG,
        weights_SG,
        normalisers_SG,
        groups,
        vocabulary,
        logits_RV.stride(0),
        out_RV.stride(0),
        STREAMS=streams,
        BLOCK=BLOCK,
        LARGEST=LARGEST_WEIGHT,
    )


def merge_rows(
    states_RH: torch.Tensor, rows_SK: torch.Tensor, weights_SK: torch.Tensor
) -> torch.Tensor:
    """The weighted sums of rows, [k, hidden size] in the type of `states_RH`, computed in float32.

    states_RH: [rows, hidden size], any float dtype, each row contiguous.
    rows_SK: [streams, k] int64, contiguous. A row may be used often.
    weights_SK: [streams, k] float32, contiguous. Each column sums to 1.

    Where all streams are the same row and the first weight is 1, the result is that row.
    """
    (streams, num), width = rows_SK.shape, states_RH.shape[-1]
    out = torch.empty(num, width, dtype=states_RH.dtype, device=states_RH.device)
    merge_kernel[(num, triton.cdiv(width, BLOCK))](
        states_RH,
        out,
        rows_SK,
        weights_SK,
        num,
        width,
        states_RH.stride(0),
        STREAMS=streams,
        BLOCK=BLOCK,
    )
    return out


if triton is not None:
    from cfg_core.blend.strength_kernel import log_sum

    @triton.jit(do_not_specialize=["num"])
    def merge_kernel(
        states,
        out,
        rows,
        weights,
        num,
        width,
        stride,
        STREAMS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A part of a row of the result, written as differences from the first follower."""
        place = tl.program_id(0)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        leader = tl.load(states + tl.load(rows + place) * stride + at, mask=inside).to(tl.float32)
        first = rows + num + place
        anchor = tl.load(states + tl.load(first) * stride + at, mask=inside).to(tl.float32)
        total = anchor + tl.load(weights + place) * (leader - anchor)
        for stream in tl.static_range(2, STREAMS):
            row = tl.load(rows + stream * num + place)
            follower = tl.load(states + row * stride + at, mask=inside).to(tl.float32)
            total += tl.load(weights + stream * num + place) * (follower - anchor)
        tl.store(out + place * width + at, total, mask=inside)

    @triton.jit
    def normalise_kernel(logits, rows, normalisers, vocabulary, stride, BLOCK: tl.constexpr):
        """log(sum(exp(row))) of the row that each program is for, in one pass."""
        place = tl.program_id(0)
        start = logits + tl.load(rows + place) * stride
        tl.store(normalisers + place, log_sum(start, vocabulary, BLOCK))

    @triton.jit
    def log_probabilities(logits, rows, normalisers, groups, stream, group, at, inside, stride):
        """A part of a stream's row, normalised."""
        place = stream * groups + group
        start = logits + tl.load(rows + place) * stride
        values = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
        return values - tl.load(normalisers + place)

    @triton.jit(do_not_specialize=["groups"])
    def blend_kernel(
        logits,
        out,
        rows,
        weights,
        normalisers,
        groups,
        vocabulary,
        stride,
        out_stride,
        STREAMS: tl.constexpr,
        BLOCK: tl.constexpr,
        LARGEST: tl.constexpr,
    ):
        """A part of a group's blend, written as `cfg_core.blend.formula.blend` writes it."""
        group = tl.program_id(0)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocabulary
        leader = log_probabilities(logits, rows, normalisers, groups, 0, group, at, inside, stride)
        never = leader == float("-inf")
        anchor = log_probabilities(logits, rows, normalisers, groups, 1, group, at, inside, stride)
        anchor = tl.where(anchor == float("-inf"), leader, anchor)
        weight = tl.load(weights + group)
        guided = anchor + tl.minimum(tl.maximum(weight, -LARGEST), LARGEST) * (leader - anchor)
        for stream in tl.static_range(2, STREAMS):
            follower = log_probabilities(
                logits, rows, normalisers, groups, stream, group, at, inside, stride
            )
            follower = tl.where(follower == float("-inf"), leader, follower)
            weight = tl.load(weights + stream * groups + group)
            weight = tl.minimum(tl.maximum(weight, -LARGEST), LARGEST)
            guided += weight * (follower - anchor)
        start = out + tl.load(rows + group) * out_stride
        tl.store(start + at, tl.where(never, float("-inf"), guided), mask=inside)
