"""The Triton kernel of strengths against bisection in float64, in the interpreter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cfg_core.blend.strength import StrengthRows, weaken
from cfg_core.blend.strength_kernel import BLOCK, weaken_rows

triton = pytest.importorskip("triton", reason="needs Triton, which this system has no wheel of")

ROOT = Path(__file__).resolve().parents[2]
NEVER = float("-inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_KL = (1e-3, 0.01, 0.05, 0.5, 1.0, 2.0, 8.0, float("inf"), 0.5)
MIN_ENTROPY = (0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 3.0, 1.0, float("inf"))


def compare() -> None:
    """Run in the interpreter: small and great pushes, forbidden tokens, open and closed gates."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, BLOCK, BLOCK + 900)
    for vocabulary, dtype, size in itertools.product(sizes, DTYPES, (1.0, 30.0, 1e20)):
        num = len(MAX_KL)
        leader = (torch.randn(num, vocabulary, generator=generator) * 4).to(dtype)
        forbidden = torch.rand(num, vocabulary, generator=generator) < 0.2
        forbidden[:, -1] = False
        leader[forbidden] = NEVER
        push = 3 + size * torch.randn(num, vocabulary, generator=generator)
        blend = torch.where(forbidden, NEVER, leader.float().log_softmax(-1) + push)
        limits = StrengthRows(
            torch.arange(num), torch.tensor(MAX_KL)[:, None], torch.tensor(MIN_ENTROPY)[:, None]
        )
        wanted, _ = weaken(leader, blend, limits)
        places = torch.randperm(num + 2, generator=generator)[:num]
        out = torch.full((num + 2, vocabulary), 7.0)
        out[places] = blend
        found = weaken_rows(leader, out, places, limits)
        case = (vocabulary, dtype, size)
        assert torch.allclose(found, exact(leader, blend, limits), rtol=1e-3, atol=0), case
        assert torch.allclose(out[places].softmax(-1), wanted.softmax(-1), atol=2e-4), case
        others = [row for row in range(num + 2) if row not in places]
        assert (out[others] == 7).all(), case


def exact(leader: torch.Tensor, blend: torch.Tensor, limits: StrengthRows) -> torch.Tensor:
    """The strengths by bisection in float64, [s] float32."""
    own = leader.double().log_softmax(-1)
    never = own == NEVER
    push = torch.where(never, 0.0, blend.double() - own)

    def kl(t: torch.Tensor) -> torch.Tensor:
        guided = torch.where(never, NEVER, own + t * push).log_softmax(-1)
        return torch.where(never, 0.0, guided.exp() * (guided - own)).sum(-1, keepdim=True)

    max_kl = limits.max_kl.double()
    low, high = torch.full_like(max_kl, -80.0), torch.zeros_like(max_kl)  # logarithms
    for _ in range(100):
        middle = (low + high) / 2
        fits = kl(middle.exp()) <= max_kl
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    found = torch.where(kl(torch.ones_like(max_kl)) <= max_kl, 1.0, low.exp())
    entropy = -torch.where(never, 0.0, own.exp() * own).sum(-1, keepdim=True)
    return torch.where(entropy < limits.min_entropy, 0.0, found)[:, 0].float()


def test_the_kernel_finds_the_largest_strength() -> None:
    """In a process of its own, because Triton decides at the import whether it interprets."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr


if __name__ == "__main__":
    compare()
