"""The Triton kernels of the blend: equal to PyTorch in the interpreter, and compiled for GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cfg_core import blend_kernel
from cfg_core.blend import LARGEST_WEIGHT, blend
from cfg_core.blend_kernel import BLOCK

triton = pytest.importorskip("triton", reason="needs Triton, which this system has no wheel of")

ROOT = Path(__file__).resolve().parents[2]
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CAPABILITIES = {"sm_80": 80, "sm_90": 90}


def compare() -> None:
    """Run in the interpreter: all rows but the leaders' stay, and those are PyTorch's blend."""
    generator = torch.Generator().manual_seed(0)
    cases = itertools.product((2, 3, 5), (1, 3), (1, 7, BLOCK, BLOCK + 900), POINTERS, (1.0, 1e30))
    for streams, groups, vocabulary, dtype, largest in cases:
        num_rows = streams * groups + 2
        logits = (torch.randn(num_rows, vocabulary, generator=generator) * 4).to(dtype)
        forbidden = torch.rand(num_rows, vocabulary, generator=generator) < 0.2
        forbidden[:, -1] = False
        logits[forbidden] = float("-inf")
        rows = torch.randperm(num_rows, generator=generator)[: streams * groups]
        rows = rows.view(streams, groups).contiguous()
        weights = torch.randn(streams, groups, generator=generator) * largest
        weights[0] = 1 - weights[1:].sum(0)
        wanted = blend(logits[rows], weights)
        out = logits.float()
        others = torch.tensor([row for row in range(num_rows) if row not in rows[0]])
        untouched = out[others].clone()
        blend_kernel.blend_rows(logits, rows, weights, out)
        case = (streams, groups, vocabulary, dtype, largest)
        rounding = 1e-5 * weights.abs().max().clamp(1, LARGEST_WEIGHT).item()
        assert torch.allclose(out[rows[0]], wanted, rtol=1e-4, atol=rounding), case
        assert torch.equal(out[others], untouched), case
    assert blend_kernel.check(torch.device("cpu"))
    assert blend_kernel.is_usable(torch.device("cpu"))


def test_the_kernels_compute_what_pytorch_does():
    """In a process of its own, because Triton decides at the import whether it interprets."""
    told = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_compile_for_gpus(capability, dtype, tmp_path, monkeypatch):
    """Triton's compiler and NVIDIA's assembler need no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", CAPABILITIES[capability], 32)
    common = {"logits": POINTERS[dtype], "rows": "*i64", "normalisers": "*fp32"}
    sizes = {"vocabulary": "i32", "stride": "i32"}
    normalise = ASTSource(
        blend_kernel.normalise_kernel,
        {**common, **sizes, "BLOCK": "constexpr"},
        {"BLOCK": BLOCK},
    )
    constants = {"BLOCK": BLOCK, "LARGEST": blend_kernel.LARGEST_WEIGHT}
    compiled = [triton.compile(normalise, target=target)]
    for streams in (2, 3):
        own = {"out": "*fp32", "weights": "*fp32", "groups": "i32", "out_stride": "i32"}
        types = {**common, **sizes, **own, **dict.fromkeys((*constants, "STREAMS"), "constexpr")}
        source = ASTSource(
            blend_kernel.blend_kernel,
            {name: types[name] for name in blend_kernel.blend_kernel.arg_names},
            {**constants, "STREAMS": streams},
        )
        compiled.append(triton.compile(source, target=target))
    for kernel in compiled:
        assert kernel.asm["cubin"][:4] == b"\x7fELF"
        assert f".target {capability}" in kernel.asm["ptx"]


def test_pytorch_blends_where_there_is_no_gpu():
    assert not blend_kernel.is_usable(torch.device("cpu"))
    assert not blend_kernel.check(torch.device("cpu"))


@pytest.mark.parametrize("fault", ["other values", "an error"])
def test_a_kernel_that_is_wrong_is_not_used(fault, monkeypatch, caplog):
    def broken(logits, rows, weights, out):
        if fault == "an error":
            raise RuntimeError("PTX JIT compilation failed")
        out[rows[0]] = blend(logits[rows], weights) + 0.01

    monkeypatch.setattr(blend_kernel, "blend_rows", broken)
    assert not blend_kernel._is_right(torch.device("cpu"))
    assert "blended by PyTorch" in caplog.text


def test_a_kernel_that_is_right_is_used(monkeypatch):
    def right(logits, rows, weights, out):
        out[rows[0]] = blend(logits[rows], weights)

    monkeypatch.setattr(blend_kernel, "blend_rows", right)
    assert blend_kernel._is_right(torch.device("cpu"))


if __name__ == "__main__":
    compare()
