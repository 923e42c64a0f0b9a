"""quantization int8: its layers, what they find, and where it is refused."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from benchmarks.embeddings.retrieval import quality
from cfg_core.errors import CompatibilityError, ConfigError
from cfg_core.prefill_only import Engine
from cfg_core.prefill_only.models import int8_linear
from cfg_core.prefill_only.models.families import BY_RUNS
from cfg_core.prefill_only.models.int8_linear import Int8Linear, quantize_linears
from cfg_core.prefill_only.options import EngineOptions
from tests.encoders import tiny_checkpoints as tiny
from tests.encoders.test_minilm import PAIRS, cosines

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa
TEXTS = tiny.random_texts(24, seed=1)


def exact(linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """What Int8Linear computes, in whole numbers of 64 bits."""
    scale = linear.weight.abs().amax(1) / 63
    weight = (linear.weight / scale[:, None]).round().long()
    row_scale = rows.abs().amax(-1, keepdim=True) / 127
    whole = (rows / row_scale + 128.5).floor().long() - 128
    return (whole @ weight.T).float() * scale * row_scale + linear.bias


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(384, 1536), (1536, 384), (64, 7)])
def test_the_layer_is_exact_in_whole_numbers(shape: tuple[int, int]):
    linear, rows = nn.Linear(*shape), torch.randn(96, shape[0])
    expected = exact(linear, rows)
    torch.testing.assert_close(Int8Linear([linear])(rows), expected, atol=2e-5, rtol=1e-5)
    assert ((linear(rows) - expected).norm() / linear(rows).norm()) < 0.03


@torch.inference_mode()
def test_sums_do_not_saturate():
    """The largest numbers everywhere: two products in 16 bits would be cut with 8-bit weights."""
    linear = nn.Linear(256, 32)
    linear.weight.fill_(1.0)
    rows = torch.ones(32, 256)
    torch.testing.assert_close(Int8Linear([linear])(rows), linear(rows), atol=1e-3, rtol=1e-5)


@torch.inference_mode()
def test_a_row_does_not_depend_on_others():
    layer, rows = Int8Linear([nn.Linear(64, 64)]), torch.randn(64, 64)
    alone = layer(rows[:32])
    rows[40] = 1e6
    rows[50] = float("nan")
    rows[51] = 0
    both = layer(rows)
    assert torch.equal(both[:32], alone)
    assert both[50].isnan().all()
    torch.testing.assert_close(both[51], layer.bias)


@torch.inference_mode()
def test_layers_of_the_same_rows_are_one_product():
    own = nn.ModuleDict({"query": nn.Linear(64, 64), "key": nn.Linear(64, 32)})
    own["value"] = nn.Linear(64, 32, bias=False)
    plain = dict(own.items())
    assert quantize_linears(nn.ModuleList([own])) == 3
    first, second = torch.randn(1, 32, 64), torch.randn(1, 32, 64)
    for names in (("query", "key", "value"), ("value", "query", "query", "key")):
        for rows in (first, second):
            for name in names:
                expected = Int8Linear([plain[name]])(rows)
                torch.testing.assert_close(own[name](rows), expected)


@pytest.fixture(scope="module")
def engines(minilm_path):
    with (
        Engine.load(minilm_path, dtype="float32") as plain,
        Engine.load(minilm_path, quantization="int8") as quantised,
    ):
        yield plain, quantised


def test_minilm_finds_the_same(engines):
    """Within 1 percent, without a layer left out; docs/log/encoders.md has 800 docstrings."""
    plain, quantised = engines
    assert quantised.info.dtype == "int8"
    questions, passages = zip(*PAIRS, strict=True)
    vectors = quantised.embed(passages)
    assert cosines(vectors, plain.embed(passages)).min() > 0.985
    found = quality(quantised.embed(questions), vectors)
    expected = quality(plain.embed(questions), plain.embed(passages))
    for name in ("recall@10", "nDCG@10"):
        assert found[name] >= 0.99 * expected[name], (name, found, expected)


def test_all_linear_layers_of_minilm_are_quantised(engines):
    layers = engines[1]._pipeline._runner._backbone.encoder.layer
    kept = [m for m in layers.modules() if isinstance(m, nn.Linear) or "Packed" in str(type(m))]
    assert not kept
    assert sum(isinstance(m, Int8Linear) for m in layers.modules()) == 3 * len(layers)


def test_a_text_is_the_same_beside_others(engines):
    texts = [passage for _, passage in PAIRS[:20]]
    together = engines[1].embed(texts)
    alone = np.stack([engines[1].embed(text) for text in texts])
    assert cosines(together, alone).min() > 0.9999


@pytest.mark.parametrize("case", sorted(tiny.SETTINGS))
def test_families(case, tmp_path):
    torch.manual_seed(7)
    path = tiny.save(tmp_path, transformers.AutoModel.from_config(tiny.config_of(case)))
    if tiny.SETTINGS[case][0] in BY_RUNS:
        with pytest.raises(CompatibilityError, match="leave quantization out"):
            Engine.load(path, quantization="int8")
        return
    with (
        Engine.load(path, dtype="float32") as plain,
        Engine.load(path, quantization="int8") as quantised,
    ):
        assert cosines(quantised.embed(TEXTS), plain.embed(TEXTS)).min() > 0.98


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4"}, "use int8, or leave it out"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "leave dtype out"),
        ({"quantization": "int8", "workflow": {"executor": "vllm"}}, "vLLM's under `vllm:`"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions.from_mapping(options)


@pytest.mark.parametrize(("device", "machine"), [("cuda", "x86_64"), ("cpu", "aarch64")])
def test_other_machines_are_refused(monkeypatch, device, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(ConfigError, match="for x86-64 CPUs"):
        int8_linear.check_int8(torch.device(device))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(CompatibilityError, match="no linear layers"):
        quantize_linears(nn.Sequential(nn.Linear(4, 4)))
