"""The blend against the executable specification (cfg_core/reference.py), and at its edges."""

import pytest
import torch

from cfg_core.blend import CutRows, blend, cut, divergence
from cfg_core.reference import Formula, combine, weigh

INF = float("inf")


def run(rows, weights):
    """rows: [streams][vocabulary]; one group."""
    logits = torch.tensor(rows).unsqueeze(1)
    return blend(logits, torch.tensor(weights).unsqueeze(-1))[0]


@pytest.mark.parametrize(
    "weights",
    [*((scale, 1 - scale) for scale in (-2.0, -1.0, 0.0, 0.5, 1.0, 1.5, 7.5)), (2.5, -1.0, -0.5)],
    ids=str,
)
def test_it_equals_the_reference_also_for_forbidden_tokens(weights):
    """A token that the leader forbids stays forbidden; one that a follower forbids counts as the
    leader's."""
    rows = torch.randn(len(weights), 50, generator=torch.Generator().manual_seed(0)).mul(3)
    rows[0, :2] = rows[1, 1:3] = rows[-1, 3] = -INF
    expected = weigh(list(torch.log_softmax(rows.double(), -1)), weights).float()
    out = run(rows.tolist(), weights)
    assert out[0] == out[1] == -INF
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e6, 7.5, -1e6])
def test_equal_streams_blend_to_themselves_at_any_scale(scale):
    row = [0.3, -2.0, 5.0, 1.0]
    torch.testing.assert_close(
        run([row, row], (scale, 1 - scale)), torch.log_softmax(torch.tensor(row), -1)
    )


def test_groups_do_not_mix_and_the_input_is_left_alone():
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    weights = torch.tensor([[1.5, 0.0, -1.0], [-0.5, 1.0, 2.0]])
    out = blend(logits, weights)
    for g in range(3):
        torch.testing.assert_close(out[g], blend(logits[:, g : g + 1], weights[:, g : g + 1])[0])
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_blended_in_float32():
    logits = torch.randn(2, 1, 100, generator=torch.Generator().manual_seed(4)).bfloat16()
    weights = torch.tensor([[3.0], [-2.0]])
    out = blend(logits, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out, blend(logits.float(), weights))


@pytest.mark.parametrize("scale", [1e300, -1e300, 1e38])
def test_extreme_scales_stay_finite_and_follow_the_difference(scale):
    """A float64 scale may overflow float32.

    The blend is then the difference of the streams, not NaN.
    """
    rows = torch.randn(2, 50, generator=torch.Generator().manual_seed(5)).tolist()
    out = run(rows, (scale, 1 - scale))
    logp = torch.log_softmax(torch.tensor(rows), dim=-1)
    difference = (logp[0] - logp[1]) * (1 if scale > 0 else -1)
    assert out.isfinite().all()
    assert out.argmax() == difference.argmax()
    assert torch.softmax(out, -1).isfinite().all()


# --- cuts -----------------------------------------------------------------------------------------


def cut_rows(*cuts):
    """Each as (top_k, min_p, filter_top_k), 0 for none."""
    top_k, min_p, filter_top_k = zip(*cuts, strict=True)
    return CutRows(
        torch.arange(len(cuts)),
        torch.tensor(top_k).unsqueeze(-1),
        torch.tensor(min_p).log().unsqueeze(-1),
        torch.tensor(filter_top_k).unsqueeze(-1),
        (max(top_k), max(filter_top_k)),
    )


CUTS = [(3, 0.0, 0), (0, 0.3, 0), (0, 0.0, 4), (5, 0.1, 3), (2, 0.0, 9), (80, 0.0, 80), (1, 1.0, 1)]


@pytest.mark.parametrize("weights", [(2.5, -1.5), (0.0, 1.0), (-1.0, 2.0)])
def test_cut_rows_equal_the_reference(weights):
    """Several rows with different cuts at once. The reference forbids what is put far below."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, len(CUTS), 50, generator=generator) * 2
    guided = blend(logits, torch.tensor(weights).unsqueeze(-1).expand(-1, len(CUTS)))
    out = cut(logits[0], guided, cut_rows(*CUTS))
    for i, (top_k, min_p, filter_top_k) in enumerate(CUTS):
        formula = Formula(
            weights=weights[1:],
            top_k=top_k or None,
            min_p=min_p or None,
            filter_top_k=filter_top_k or None,
        )
        expected = combine(list(torch.log_softmax(logits[:, i], -1)), formula, 0)
        kept = expected > -INF
        torch.testing.assert_close(out[i][kept], expected[kept], atol=1e-4, rtol=1e-5)
        if not kept.all():
            # Even at a temperature of 100, none of the others has a probability.
            assert out[i][~kept].max() < out[i][kept].min() - 5_000


@pytest.mark.parametrize("weights", [(2.5, -1.5), (1e20, -1e20), (0.0, 1.0)])
def test_cut_tokens_stay_in_order_and_finite(weights):
    """A mask that forbids all kept tokens leaves the best of the others."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 1, 50, generator=generator)
    logits[:, 0, 7] = -INF
    guided = blend(logits, torch.tensor(weights).unsqueeze(-1))
    out = cut(logits[0], guided, cut_rows((2, 0.0, 0)))[0]
    others = guided[0].clone()
    kept = logits[0, 0].topk(2).indices
    others[kept] = -INF
    left = out.clone()
    left[kept] = -INF
    assert left.argmax() == others.argmax()
    assert out[7] == -INF
    assert out[torch.arange(50) != 7].isfinite().all()
    assert out.topk(2).indices.sort().values.tolist() == kept.sort().values.tolist()


def test_the_divergence_is_that_of_the_distributions():
    rows = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(6))
    rows[:, 0, 4] = -INF
    p, q = torch.softmax(rows[0].double(), -1), torch.softmax(rows[1].double(), -1)
    terms = torch.where(p > 0, p * (p.log() - q.log()), 0.0)
    torch.testing.assert_close(divergence(rows[0], rows[1]), terms.sum(-1).float())
    assert divergence(rows[1], rows[1]).abs().max() < 1e-6
