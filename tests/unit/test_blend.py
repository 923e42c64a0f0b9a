"""The blend against a slow oracle in plain Python floats, and at its edges."""

import math

import pytest
import torch

from cfg_core.blend import blend

INF = float("inf")


def slow_blend(rows, weights):
    """One group, plain loops, float64. rows: per stream a list of logits."""

    def log_softmax(row):
        top = max(row)
        total = math.log(sum(math.exp(x - top) for x in row)) + top
        return [x - total for x in row]

    logp = [log_softmax(row) for row in rows]
    out = []
    for token, leader in enumerate(logp[0]):
        if leader == -INF:
            out.append(-INF)
            continue
        values = [leader] + [p[token] if p[token] != -INF else leader for p in logp[1:]]
        out.append(sum(w * v for w, v in zip(weights, values, strict=True)))
    return out


def run(rows, weights):
    """rows: [streams][vocabulary]; one group."""
    logits = torch.tensor(rows).unsqueeze(1)
    return blend(logits, torch.tensor(weights).unsqueeze(-1))[0]


@pytest.mark.parametrize("scale", [-2.0, -1.0, 0.0, 0.5, 1.0, 1.5, 3.0, 7.5])
def test_a_pair_equals_the_oracle(scale):
    rows = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).mul(3).tolist()
    expected = torch.tensor(slow_blend(rows, (scale, 1 - scale)))
    torch.testing.assert_close(run(rows, (scale, 1 - scale)), expected, atol=1e-4, rtol=1e-5)


def test_three_streams_equal_the_oracle():
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).mul(3).tolist()
    weights = (2.5, -1.0, -0.5)
    torch.testing.assert_close(
        run(rows, weights), torch.tensor(slow_blend(rows, weights)), atol=1e-4, rtol=1e-5
    )


def test_scale_one_is_the_conditional_stream_and_scale_zero_the_negative():
    rows = torch.randn(2, 50, generator=torch.Generator().manual_seed(2)).tolist()
    logp = torch.log_softmax(torch.tensor(rows), dim=-1)
    torch.testing.assert_close(run(rows, (1.0, 0.0)), logp[0])
    torch.testing.assert_close(run(rows, (0.0, 1.0)), logp[1])


def test_equal_streams_blend_to_themselves_at_any_scale():
    row = [0.3, -2.0, 5.0, 1.0]
    torch.testing.assert_close(
        run([row, row], (7.5, -6.5)), torch.log_softmax(torch.tensor(row), -1)
    )


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5, 1.5, 7.5])
def test_forbidden_tokens(scale):
    """Which stream decides about a token that is forbidden.

    A token that the leader forbids stays forbidden. If only the follower forbids it, the leader's
    logit applies. If both forbid it, the result is not NaN.
    """
    rows = [[1.0, -INF, 2.0, -INF], [1.0, 2.0, -INF, -INF]]
    out = run(rows, (scale, 1 - scale))
    assert out[1] == out[3] == -INF
    assert out[2] == torch.log_softmax(torch.tensor(rows[0]), -1)[2]
    assert not out.isnan().any()
    assert not (out == INF).any()


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
