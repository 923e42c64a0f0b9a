"""sdpa_runs against the naive loop, with random packings, windows and directions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import CompatibilityError
from cfg_core.prefill_only.batch import pack
from cfg_core.prefill_only.stages import attention
from cfg_core.prefill_only.types import RequestOptions, SequenceState


def packed(lengths: list[int]):
    sequences = [
        SequenceState([1] * n, None, RequestOptions(), i) for i, n in enumerate(sorted(lengths))
    ]
    return pack(sequences)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 12),
    kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_runs_equal_the_loop(lengths, causal, window, kv_heads, seed):
    plan = packed(lengths).plan
    generator = torch.Generator().manual_seed(seed)

    def rows(
        heads: int,
    ) -> torch.Tensor:  # as transformers has them: [T, H, D] in memory, seen as [H, T, D]
        return torch.randn(sum(lengths), heads, 8, generator=generator).transpose(0, 1)

    q, k, v = rows(4), rows(kv_heads), rows(kv_heads)
    expected = attention.naive(q, k, v, plan, causal, 0.3, window)
    torch.testing.assert_close(
        attention.sdpa_runs(q, k, v, plan, causal, 0.3, window), expected, atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 64, 256, 300, 700])
def test_windows_of_long_texts_equal_the_loop(causal: bool, window: int):
    plan = packed([3, 255, 256, 257, 600, 600, 1000]).plan
    q, k, v = torch.randn(3, 4, sum((3, 255, 256, 257, 600, 600, 1000)), 8)
    expected = attention.naive(q, k[:2], v[:2], plan, causal, 0.3, window)
    got = attention.sdpa_runs(q, k[:2], v[:2], plan, causal, 0.3, window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_no_mask_grows_with_the_square_of_a_text(monkeypatch):
    """What was kept for 64 lengths of ModernBERT at 8,192 tokens took 4 GiB."""
    sizes, call = [], attention.F.scaled_dot_product_attention

    def record(*args, attn_mask=None, **options):
        sizes.append(0 if attn_mask is None else attn_mask.numel())
        return call(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", record)
    rows = torch.randn(1, 8192, 8)
    attention.sdpa_runs(rows, rows, rows, packed([8192]).plan, False, 1.0, 65)
    assert len(sizes) == 8192 // attention.QUERIES
    assert 0 < max(sizes) <= attention.QUERIES * (attention.QUERIES + 2 * 65)


def test_a_nan_stays_in_its_sequence():
    plan = packed([3, 3, 3, 5]).plan
    rows = torch.randn(14, 2, 8).transpose(0, 1).clone()
    rows[:, 3:6] = float("nan")
    out = attention.sdpa_runs(rows, rows, rows, plan, False, 1.0, None)
    assert out[3:6].isnan().all()
    assert out[:3].isfinite().all()
    assert out[6:].isfinite().all()


def test_the_window_counts_both_ways_and_itself():
    visible = attention._visible(4, False, 2, torch.device("cpu"))
    assert visible.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert attention._visible(3, True, 2, torch.device("cpu")).int().tolist() == [
        [1, 0, 0],
        [1, 1, 0],
        [0, 1, 1],
    ]


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_unsupported_attention_is_refused(name):
    adapted = attention._adapted(attention.naive)
    rows = torch.randn(1, 2, 3, 8)
    with pytest.raises(CompatibilityError, match=name):
        adapted(torch.nn.Module(), rows, rows, rows, None, plan=packed([3]).plan, **{name: 1.0})


def test_a_model_that_loses_the_plan_is_noticed():
    rows = torch.randn(1, 2, 3, 8)
    with pytest.raises(AssertionError, match="plan"):
        attention._adapted(attention.naive)(torch.nn.Module(), rows, rows, rows, None)


@pytest.mark.parametrize("float32_is_faster", [True, False])
def test_bfloat16_on_a_cpu(monkeypatch, float32_is_faster):
    """It may be computed in float32, which only rounds less."""
    monkeypatch.setattr(attention, "_float32_is_faster", lambda: float32_is_faster)
    plan = packed([3, 7, 7, 20]).plan
    rows = [torch.randn(37, 4, 8).bfloat16().transpose(0, 1) for _ in range(3)]
    out = attention.sdpa_runs(*rows, plan, False, 0.3, None)
    assert out.dtype == torch.bfloat16
    expected = attention.naive(*(x.float() for x in rows), plan, False, 0.3, None)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
