"""The blend's Triton kernels on a GPU: equal to float64 within float32's rounding, and checked."""

from __future__ import annotations

import pytest
import torch

from cfg_core.blend import blend
from cfg_core.blend import kernel as blend_kernel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_a_worker_would_use_the_kernels():
    assert blend_kernel.check(CUDA)
    assert blend_kernel.is_usable(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 50, 2048, 2049, 49152, 128256, 262144])
@pytest.mark.parametrize(("streams", "groups"), [(2, 1), (2, 33), (3, 7), (8, 2)])
def test_equal_to_float64(dtype, vocabulary, streams, groups):
    generator = torch.Generator("cuda").manual_seed(0)
    num = streams * groups
    logits = 5 * torch.randn(num, vocabulary, device=CUDA, generator=generator)
    logits[: num // 2, vocabulary // 3 : vocabulary // 2] = -torch.inf
    logits = logits.to(dtype)
    rows = torch.randperm(num, device=CUDA, generator=generator).view(streams, groups)
    weights = torch.randn(streams, groups, device=CUDA, generator=generator)
    weights[0] = 1 - weights[1:].sum(0)
    wanted = blend(logits[rows], weights)
    exact = logits.double().log_softmax(-1)[rows]
    out = torch.zeros(num, vocabulary, device=CUDA)
    blend_kernel.blend_rows(logits, rows, weights, out)
    found = out[rows[0]]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    finite = exact.isfinite().all(0)
    expected = (exact.masked_fill(~finite, 0.0) * weights[..., None].double()).sum(0)
    error = (found.double() - expected)[finite].abs().max() if finite.any() else 0.0
    assert float(error) < 1e-4 * float(1 + weights.abs().sum(0).max())
