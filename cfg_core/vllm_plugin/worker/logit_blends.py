"""Groups that are blended after the model's head: their rows of logits, and what changes them.

In this order: a rule computes the scale, the streams are blended, limits weaken the blend, and cuts
forbid tokens. Each is a function of one position's rows, so drafts stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cfg_core.blend import (
    CutRows,
    RuleRows,
    StrengthRows,
    blend,
    cut,
    entropy,
    kernel,
    strength_kernel,
    weaken,
)

PIECE_BYTES = 1 << 20
"""About so large is a float32 tensor of rows of the vocabulary that is computed on a CPU.

A blend goes over its rows up to forty times, with several tensors of their size, and memory is too
slow for that: 32 rows with a trust region take 2.5 times as long in pieces of 8 MiB, which no cache
holds.
"""


RULED_ROWS = 64
"""Rows whose rule is computed at once on a GPU. With a vocabulary of 152,000, what it makes of them
takes about 0.4 GiB, and vLLM has measured the memory without it."""


def pieces(
    rows: int, values: int, device: torch.device, most: int | None = None
) -> Iterator[slice]:
    """Cut rows into those that are computed at once: on a GPU all of them, or `most`.

    values: how many numbers the computation reads for each row.
    """
    on_gpu = max(1, rows if most is None else most)
    size = max(1, PIECE_BYTES // (4 * values)) if device.type == "cpu" else on_gpu
    return (slice(first, min(rows, first + size)) for first in range(0, max(1, rows), size))


class LogitBlend(NamedTuple):
    """Rows of groups with equally many streams that are blended after the head.

    of_logits: [streams, n] int64.
    weights: [streams, n] float32.
    cuts: which of them are cut; None if none is.
    limits: which of them have limits of their strength; None if none has.
    rules: which of them have a rule that computes their weights.
    probes: whether all of them are probes (core/gates.py).
    """

    of_logits: torch.Tensor
    weights: torch.Tensor
    cuts: CutRows | None = None
    limits: StrengthRows | None = None
    rules: tuple[RuleRows, ...] = ()
    probes: bool = False


def blend_logits(
    logits: torch.Tensor,
    group: LogitBlend,
    out: torch.Tensor,
    strengths: torch.Tensor | None = None,
) -> None:
    """Write the blend of rows of `logits` [rows, vocabulary] into `out`, which may be the same.

    strengths: [2, rows] float32, see `blended`. Those of rows with limits or a rule are written
        into it.
    """
    leaders, vocabulary, cuts = group.of_logits[0], logits.shape[-1], group.cuts
    own_of_cut = None if cuts is None else logits[leaders[cuts.rows]]
    if group.probes and not kernel.is_usable(logits.device):
        _probe(logits, group, out, strengths)
    else:
        _blend(logits, group, out, strengths)
    if cuts is not None and own_of_cut is not None:
        places = leaders[cuts.rows]
        for part in pieces(len(places), vocabulary, logits.device):
            out[places[part]] = cut(own_of_cut[part], out[places[part]], cuts.part(part))


def _probe(
    logits: torch.Tensor, group: LogitBlend, out: torch.Tensor, strengths: torch.Tensor | None
) -> None:
    """What `_blend` makes of rows that are their own negatives, with less work."""
    assert group.limits is not None
    for part in pieces(len(group.of_logits[0]), logits.shape[-1], logits.device):
        places, limits = group.of_logits[0, part], group.limits.part(part)
        own = torch.log_softmax(logits[places].float(), dim=-1)
        out[places] = own
        if strengths is not None:
            strengths[:, places] = (entropy(own) >= limits.min_entropy[:, 0]).float()


def _blend(
    logits: torch.Tensor, group: LogitBlend, out: torch.Tensor, strengths: torch.Tensor | None
) -> None:
    """As `blend_logits`, without cuts."""
    leaders, vocabulary, limits = group.of_logits[0], logits.shape[-1], group.limits
    own_of_limited = None if limits is None else logits[leaders[limits.rows]]
    weights = ruled_weights(logits, group)
    if kernel.is_usable(logits.device):
        kernel.blend_rows(logits, group.of_logits, weights, out)
    else:
        for part in pieces(len(leaders), len(group.of_logits) * vocabulary, logits.device):
            out[leaders[part]] = blend(logits[group.of_logits[:, part]], weights[:, part])
    if limits is not None and own_of_limited is not None:
        places = leaders[limits.rows]
        found = weaken_rows(own_of_limited, out, places, limits)
        if strengths is not None:
            strengths[:, places] = found
    if strengths is not None:
        for rule in group.rules:
            places, scale = leaders[rule.rows], weights[0, rule.rows]
            strengths[1, places] = 1 + strengths[0, places] * (scale - 1)


def weaken_rows(
    leaders: torch.Tensor, out: torch.Tensor, places: torch.Tensor, limits: StrengthRows
) -> torch.Tensor:
    """Weaken the blended rows `places` [s] of `out`, in place. Returns their strengths, [s].

    leaders: [s, vocabulary], the logits of their leaders.
    """
    if kernel.is_usable(out.device):
        return strength_kernel.weaken_rows(leaders, out, places, limits)
    strengths = torch.empty(len(places), device=out.device)
    for part in pieces(len(places), out.shape[-1], out.device):
        out[places[part]], strengths[part] = weaken(
            leaders[part], out[places[part]], limits.part(part)
        )
    return strengths


def ruled_weights(logits: torch.Tensor, group: LogitBlend) -> torch.Tensor:
    """The weights of a group's rows, [streams, n] float32, with those that rules compute."""
    if not group.rules:
        return group.weights
    weights = group.weights.clone()  # `group` is kept for steps to come
    for rule in group.rules:
        for part in pieces(len(rule.rows), 2 * logits.shape[-1], logits.device, RULED_ROWS):
            own = rule.part(part)
            scales = own.scales(logits[group.of_logits[:, own.rows]], weights[0, own.rows])
            weights[0, own.rows], weights[1, own.rows] = scales, 1 - scales
    return weights
