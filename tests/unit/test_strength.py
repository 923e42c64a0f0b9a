"""Limits of the strength against the executable specification, and at their edges."""

from __future__ import annotations

import pytest
import torch

from cfg_core.blend import StrengthRows, blend, weaken
from cfg_core.params import Strength
from cfg_core.reference import FORBIDDEN, Formula, combine, divergence, entropy, strength

VOCABULARY = 2048
SCALES = (1.5, 4.0, -3.0, 50.0, 1e4)
SPREADS = (0.3, 1.0, 3.0, 8.0)
LIMITS = (0.01, 0.3, 4.0)


def rows_of(limits: list[Strength | None]) -> StrengthRows:
    made = StrengthRows.of(limits, lambda values, dtype: torch.from_numpy(dtype(values)))
    assert made is not None
    return made


def streams(spread: float, rows: int = 8) -> torch.Tensor:
    """[2, rows, vocabulary]: followers from nearly the leader to unlike it."""
    generator = torch.Generator().manual_seed(int(10 * spread))
    leader = torch.randn(rows, VOCABULARY, generator=generator) * spread
    noise = torch.randn(rows, VOCABULARY, generator=generator) * spread
    return torch.stack([leader, leader + torch.linspace(0, 1, rows).unsqueeze(-1) * noise])


def guided(logits: torch.Tensor, scale: float) -> torch.Tensor:
    weights = torch.tensor([scale, 1 - scale]).unsqueeze(-1)
    return blend(logits, weights.expand(-1, logits.shape[1]))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("limit", LIMITS)
def test_the_trust_region_is_that_of_bisection_in_float64(
    spread: float, scale: float, limit: float
) -> None:
    logits = streams(spread)
    whole = guided(logits, scale)
    limits = rows_of([Strength(max_kl=limit)] * len(whole))
    out, found = weaken(logits[0], whole, limits)
    leader = torch.log_softmax(logits[0].double(), -1)
    for row in range(len(whole)):
        push = whole[row].double() - torch.log_softmax(logits[0, row], -1).double()
        want = strength(leader[row], push, Formula(max_kl=limit))
        assert abs(float(found[row]) - want) <= 1e-3 * want
        assert divergence(out[row], leader[row]) <= limit * 1.002 + 1e-5


@pytest.mark.parametrize("limit", LIMITS)
def test_plateaus(limit: float) -> None:
    """Few tokens with logits far apart: the divergence is nearly flat over much of the strength."""
    logits = streams(60.0, rows=64)[:, :, :260].contiguous()
    whole = guided(logits, 4.0)
    out, found = weaken(logits[0], whole, rows_of([Strength(max_kl=limit)] * len(whole)))
    leader = torch.log_softmax(logits[0].double(), -1)
    for row in torch.nonzero(found < 1)[:, 0].tolist():
        assert divergence(out[row], leader[row]) == pytest.approx(limit, rel=2e-3)


def test_one_formula_with_the_reference() -> None:
    """Different limits at once, with tokens that one of the streams forbids."""
    logits = streams(2.0, rows=5)[:, :, :64].contiguous()
    logits[0, :, 3] = logits[1, :, 5] = FORBIDDEN
    edge = entropy(torch.log_softmax(logits[0, 3], -1))
    limits = [
        Strength(max_kl=0.2),
        Strength(max_kl=1e9),
        Strength(min_entropy=edge + 0.1),
        Strength(min_entropy=edge - 0.1, max_kl=0.5),
        Strength(min_entropy=1e9),
    ]
    whole = guided(logits, 3.0)
    out, found = weaken(logits[0], whole, rows_of(list(limits)))
    for row, own in enumerate(limits):
        formula = Formula(weights=(-2.0,), max_kl=own.max_kl, min_entropy=own.min_entropy)
        rows = list(torch.log_softmax(logits[:, row], -1))
        want = combine(rows, formula, 0)
        torch.testing.assert_close(out[row], want, atol=2e-3, rtol=1e-3)
        assert out[row, 3] == FORBIDDEN
    assert found[1] == 1
    assert torch.equal(out[1], whole[1])
    assert found[4] == 0
    torch.testing.assert_close(out[4], torch.log_softmax(logits[0, 4], -1))


@pytest.mark.parametrize("scale", [1.0, 1e20, -1e20])
def test_no_push_and_huge_ones(scale: float) -> None:
    logits = streams(3.0)
    out, found = weaken(
        logits[0], guided(logits, scale), rows_of([Strength(max_kl=0.5)] * logits.shape[1])
    )
    assert out.isfinite().all()
    assert ((found >= 0) & (found <= 1)).all()
    leader = torch.log_softmax(logits[0].double(), -1)
    assert all(divergence(out[row], leader[row]) <= 0.51 for row in range(len(out)))


def test_rows_without_limits() -> None:
    assert StrengthRows.of([None, None], lambda values, dtype: torch.tensor(values)) is None
    made = rows_of([None, Strength(max_kl=2), None, Strength(min_entropy=1)])
    assert made.rows.tolist() == [1, 3]
    assert made.max_kl.tolist() == [[2], [float("inf")]]
    assert made.min_entropy.tolist() == [[0], [1]]
    assert made.part(slice(1, 2)).rows.tolist() == [3]


def test_a_row_does_not_depend_on_the_others() -> None:
    """Beside small and huge pushes, and whether the limits of the others bind."""
    logits = streams(2.0)
    whole = guided(logits, 4.0)
    limits = rows_of([Strength(max_kl=0.5)] * len(whole))
    _, alike = weaken(logits[0], whole, limits)
    others = torch.where(torch.arange(len(whole)).unsqueeze(-1) < 6, whole, 1e3 * whole)
    _, unlike = weaken(logits[0], others, limits)
    assert (alike[:6] < 1).any()
    torch.testing.assert_close(unlike[:6], alike[:6], atol=0, rtol=3e-7)
