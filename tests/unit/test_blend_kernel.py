"""The Triton kernels of the blend: equal to PyTorch in the interpreter, and compiled for GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cfg_core.blend import LARGEST_WEIGHT, StrengthRows, blend, strength_kernel, weaken
from cfg_core.blend import kernel as blend_kernel
from cfg_core.blend.kernel import BLOCK

triton = pytest.importorskip("triton", reason="needs Triton, which this system has no wheel of")

ROOT = Path(__file__).resolve().parents[2]
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CAPABILITIES = {"sm_80": 80, "sm_90": 90}


def compare() -> None:
    """Run in the interpreter: all rows but the leaders' stay, and those are PyTorch's blend."""
    generator = torch.Generator().manual_seed(0)
    shapes = itertools.product((2, 3, 5), (1, 3), (1, 7, BLOCK, BLOCK + 900))
    kinds = itertools.cycle(itertools.product((1.0, 1e30), POINTERS))
    for (streams, groups, vocabulary), (largest, dtype) in zip(shapes, kinds, strict=False):
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
    compare_merged(generator)
    compare_weakened(generator)
    assert blend_kernel.check(torch.device("cpu"))
    assert blend_kernel.is_usable(torch.device("cpu"))


def compare_merged(generator: torch.Generator) -> None:
    """Rows that are made of themselves stay bit for bit, and the others are PyTorch's sums."""
    for streams, width, dtype in itertools.product((2, 3, 5), (1, 7, BLOCK + 900), POINTERS):
        states = torch.randn(9, width, generator=generator).to(dtype)
        rows = torch.tensor([[1, 0, 4]] + [[2, 0, 8 - n] for n in range(1, streams)])
        weights = torch.randn(streams, 3, generator=generator)
        weights[0] = 1 - weights[1:].sum(0)
        weights[:, 1] = torch.eye(streams)[0]
        merged = blend_kernel.merge_rows(states, rows, weights)
        wanted = (states[rows].float() * weights.unsqueeze(-1)).sum(0)
        assert merged.dtype == dtype
        assert torch.equal(merged[1], states[0]), (streams, width, dtype)
        assert torch.allclose(merged.float(), wanted, rtol=1e-2, atol=1e-2), (streams, width, dtype)
        if dtype == torch.float32:
            assert torch.allclose(merged, wanted, rtol=1e-4, atol=1e-4), (streams, width)


def compare_weakened(generator: torch.Generator) -> None:
    """Regions and gates that bind and do not, at scales up to the largest: PyTorch's strengths."""
    cases = itertools.product(
        (0.01, 0.5, float("inf")), (0.5, 3.0, 1e20, -1e4), (1, 7, BLOCK, BLOCK + 900)
    )
    for (limit, scale, vocabulary), dtype in zip(cases, itertools.cycle(POINTERS), strict=False):
        logits = (torch.randn(2, 4, vocabulary, generator=generator) * 3).to(dtype)
        forbidden = torch.rand(logits.shape, generator=generator) < 0.2
        forbidden[..., -1] = False
        logits[forbidden] = float("-inf")
        blended = blend(logits, torch.tensor([[scale], [1 - scale]]).expand(2, 4))
        gates = torch.tensor([[0.0], [1.0], [1e9], [0.0]])
        limits = StrengthRows(torch.arange(4), torch.full((4, 1), limit), gates)
        wanted, strengths = weaken(logits[0], blended, limits)
        out, places = torch.full((6, vocabulary), 7.0), torch.tensor([3, 0, 5, 2])
        out[places] = blended
        found = strength_kernel.weaken_rows(logits[0].contiguous(), out, places, limits)
        case = (vocabulary, dtype, scale, limit)
        assert torch.allclose(found, strengths, rtol=1e-3, atol=1e-6), case
        assert torch.allclose(out[places], wanted, rtol=2e-3, atol=2e-3), case
        assert (out[[1, 4]] == 7).all(), case


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
        own = {"states": POINTERS[dtype], "out": POINTERS[dtype], "rows": "*i64"}
        own |= {"weights": "*fp32", "num": "i32", "width": "i32", "stride": "i32"}
        types = {**own, "STREAMS": "constexpr", "BLOCK": "constexpr"}
        merge = ASTSource(blend_kernel.merge_kernel, types, {"STREAMS": streams, "BLOCK": BLOCK})
        compiled.append(triton.compile(merge, target=target))
    constants = {"BLOCK": strength_kernel.BLOCK, "ROUNDS": strength_kernel.ROUNDS}
    constants |= {name: getattr(strength_kernel, name) for name in ("CLOSE", "LEAST", "SMALLEST")}
    types = {"leaders": POINTERS[dtype], "places": "*i64", "vocabulary": "i32", "stride": "i32"}
    types |= dict.fromkeys(("outs", "max_kls", "min_entropies", "strengths"), "*fp32")
    types |= {"out_stride": "i32", **dict.fromkeys(constants, "constexpr")}
    names = strength_kernel.weaken_kernel.arg_names
    weak = ASTSource(
        strength_kernel.weaken_kernel, {name: types[name] for name in names}, constants
    )
    compiled.append(triton.compile(weak, target=target))
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
    monkeypatch.setattr(blend_kernel, "merge_rows", merged_right)
    monkeypatch.setattr(blend_kernel, "weaken_rows", weakened_right)
    assert not blend_kernel._is_right(torch.device("cpu"))
    assert "blended by PyTorch" in caplog.text


def blended_right(logits, rows, weights, out):
    out[rows[0]] = blend(logits[rows], weights)


def weakened_right(leader, out, places, limits):
    out[places], strengths = weaken(leader, out[places], limits)
    return strengths


def merged_right(states, rows, weights):
    return (states[rows] * weights.unsqueeze(-1)).sum(0)


def test_a_merge_that_is_wrong_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(blend_kernel, "blend_rows", blended_right)
    monkeypatch.setattr(blend_kernel, "merge_rows", lambda *a: merged_right(*a) + 0.01)
    monkeypatch.setattr(blend_kernel, "weaken_rows", weakened_right)
    assert not blend_kernel._is_right(torch.device("cpu"))
    assert "other values" in caplog.text


def test_a_strength_that_is_wrong_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(blend_kernel, "blend_rows", blended_right)
    monkeypatch.setattr(blend_kernel, "merge_rows", merged_right)
    monkeypatch.setattr(blend_kernel, "weaken_rows", lambda *a: weakened_right(*a) * 0.9)
    assert not blend_kernel._is_right(torch.device("cpu"))
    assert "other values" in caplog.text


def test_kernels_that_are_right_are_used(monkeypatch):
    monkeypatch.setattr(blend_kernel, "weaken_rows", weakened_right)
    monkeypatch.setattr(blend_kernel, "blend_rows", blended_right)
    monkeypatch.setattr(blend_kernel, "merge_rows", merged_right)
    assert blend_kernel._is_right(torch.device("cpu"))


if __name__ == "__main__":
    compare()
